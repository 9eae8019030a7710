from tests.kernels.attention_suite import AttentionSuite


class TestXla(AttentionSuite):
    backend = "xla"
