"""`python scripts bench chat`: what it counts, and what it refuses."""

import json
from dataclasses import dataclass, field

import pytest

from jaxkv.cli import console
from scripts.bench import chat as bench_chat
from scripts.bench.chat import Workload, converse
from scripts.bench.chat_systems import Answer
from tests.models.tiny_checkpoint import write_hf

SMALL = Workload(conversations=2, turns=3, system=20, user=6, new=4)


@dataclass
class Echo:
    """A server that knows every prompt's first tokens, all but those of the last `user` ones."""

    batches: list[list[list[int]]] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)

    def serve(self, prompts: list[list[int]], num_new: int) -> list[Answer]:
        self.batches.append([list(prompt) for prompt in prompts])
        self.host_seconds.append(0.25 * len(self.batches))
        return [
            Answer([prompt[-1]] * num_new, 0.5 * len(prompt), len(prompt) - 6) for prompt in prompts
        ]

    def forget(self) -> None:
        self.batches.clear()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_prompt_is_the_conversation_so_far(one_by_one):
    workload = Workload(**{**vars(SMALL), "one_by_one": one_by_one})
    server, served = Echo(), []
    figures = converse(server, workload, 300, 0, served.append)
    assert {len(batch) for batch in server.batches} == {1 if one_by_one else 2}
    prompts = [prompt for batch in server.batches for prompt in batch]
    assert len(prompts) == sum(served) == 6
    system = prompts[0][:20]
    for i, prompt in enumerate(prompts):
        assert len(prompt) == 26 + 10 * (i // 2)
        assert prompt[:20] == system
        if i >= 2:
            before = prompts[i - 2]
            assert prompt[: len(before) + 4] == before + [before[-1]] * 4
    assert prompts[0][20:] != prompts[1][20:]
    assert figures.generated_tokens == 24
    assert figures.prefilled_tokens == 6 * 6
    assert figures.hit_rate == pytest.approx(1 - 36 / (2 * (26 + 36 + 46)))
    assert figures.first_token_seconds == [13.0, 18.0, 23.0]
    assert figures.host_us_per_decode_step == 0.25e6 * (len(server.batches) + 1) / 2


def test_a_seed_fixes_the_texts_which_are_clear_of_control_tokens():
    system, questions = SMALL.texts(300, 1)
    assert (system, questions) == SMALL.texts(300, 1) != SMALL.texts(300, 2)
    flat = [*system, *(token for turn in questions for talk in turn for token in talk)]
    assert all(75 <= token < 150 for token in flat)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_hf(tmp_path_factory.mktemp("bench") / "model"))


@pytest.fixture
def run(model, monkeypatch, capsys):
    """Runs the command on the tiny model; returns exit code, standard output and error."""
    monkeypatch.setattr(console, "enable_compilation_cache", lambda: None)
    sizes = ["--conversations", "2", "--turns", "2", "--system", "20", "--user", "6", "--new", "3"]

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = console.run(bench_chat.main, ["--model", model, *sizes, *arguments])
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_index_computes_the_system_prompt_once_and_each_turn_once(run):
    code, out, err = run("--json", "--page-size", "8")
    report = json.loads(out)
    assert code == 0
    with_index, without = report["systems"].values()
    assert without["prefilled_tokens"] == 2 * 26 + 2 * 35
    # Shared: the system prompt; of the first turn all but the answer's last token.
    assert with_index["prefilled_tokens"] == 26 + 6 + 2 * 7
    assert with_index["generated_tokens"] == without["generated_tokens"] == 12
    assert report["equal_answers"] == [4, 4]
    assert report["seconds_ratio"] == with_index["seconds"] / without["seconds"]
    assert "compiled in timed rounds" not in err


def test_the_table_has_a_row_for_each_system_and_the_ratios(monkeypatch):
    figures = bench_chat.Figures(
        seconds=2.0,
        prefilled_tokens=10,
        generated_tokens=4,
        hit_rate=0.5,
        first_token_seconds=[0.4, 0.1],
        host_us_per_decode_step=None,
        tokens=[[1], [2]],
    )
    other = bench_chat.Figures(
        seconds=8.0,
        prefilled_tokens=20,
        generated_tokens=4,
        hit_rate=0.0,
        first_token_seconds=[0.4, 0.8],
        host_us_per_decode_step=100.0,
        tokens=[[1], [3]],
    )
    rounds = [{bench_chat.WITH: figures, bench_chat.WITHOUT: other}]
    lines = bench_chat.table(bench_chat.summary(Workload(turns=2), rounds)).splitlines()
    assert lines[2] == "| jaxkv, index | 2.00 | 10 | 4 | 50.0% | 0.400 | 0.100 | - |"
    assert lines[3] == "| jaxkv, no index | 8.00 | 20 | 4 | 0.0% | 0.400 | 0.800 | 100 |"
    assert "0.250 of the time, 0.125 of the wait" in lines[5]
    assert lines[5].endswith("1 of 2 answers are equal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--turns", "0"], "--turns", id="turns"),
        pytest.param(["--page-size", "0"], "--page-size", id="no page size"),
        pytest.param(["--page-size", "3"], "page_size", id="page size"),
        pytest.param(["--new", "x"], "--new", id="not a number"),
        pytest.param(["--system", "4000"], "4018 tokens", id="too long"),
        pytest.param(["--model", "no-such-model"], "no-such-model", id="model"),
    ],
)
def test_a_wrong_argument_is_one_line_and_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (console.EXIT_USER_ERROR, "")
    assert message in err
    assert len(err.splitlines()) == 1
