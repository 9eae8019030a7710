"""Text of an answer: what is streamed is what is kept, and no stop string is ever in it."""

from hypothesis import example, given
from hypothesis import strategies as st

from jaxkv.engine.stopping import AnswerText

PIECES = st.lists(st.text("abé", max_size=3), max_size=12)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3).map(tuple)


class Spelling:
    """Token i is text i; halves of a pair of tokens are held back as a detokenizer would."""

    def __init__(self, pieces: list[str], tail: str = ""):
        self.pieces = pieces
        self.tail = tail

    def push(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def flush(self) -> str:
        tail, self.tail = self.tail, ""
        return tail


def stream(pieces: list[str], stops: tuple[str, ...], tail: str = "") -> tuple[list[str], bool]:
    """Returns the text released by each token, and whether a stop string was found."""
    text = AnswerText(Spelling(pieces, tail), stops)
    given_out = []
    for i in range(len(pieces)):
        given_out.append(text.push(i))
        if text.stopped:
            break
    given_out.append(text.finish())
    return given_out, text.stopped


def cut(pieces: list[str], stops: tuple[str, ...], tail: str) -> tuple[str, bool]:
    """Joins pieces until the text holds a stop string, and cuts it before the first one."""
    text = ""
    for piece in [*pieces, tail]:
        text += piece
        ends = [text.index(stop) for stop in stops if stop in text]
        if ends:
            return text[: min(ends)], True
    return text, False


@given(pieces=PIECES, stops=STOPS, tail=st.sampled_from(["", "\ufffd", "ab"]))
@example(pieces=["a", "b", "a", "b", "c"], stops=("abc",), tail="")  # restarts inside itself
@example(pieces=["ab", "c"], stops=("abcd", "bc"), tail="")  # one inside the other
@example(pieces=["ab"], stops=("a", "ab"), tail="")  # one begins the other
@example(pieces=["x", "a"], stops=("ab",), tail="")  # held back to the very end
@example(pieces=["x", "a"], stops=("ab",), tail="b")  # completed by the last flush
def test_streamed_text_is_the_text_before_the_first_stop(pieces, stops, tail):
    given_out, stopped = stream(pieces, stops, tail)
    assert ("".join(given_out), stopped) == cut(pieces, stops, tail)
    assert not any(stop in "".join(given_out) for stop in stops)


@given(pieces=PIECES, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(pieces, stops):
    given_out, stopped = stream(pieces, stops)
    if stopped:
        return
    for i in range(len(pieces)):
        so_far, sent = "".join(pieces[: i + 1]), "".join(given_out[: i + 1])
        held = so_far[len(sent) :]
        assert so_far.startswith(sent)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_nothing_follows_a_stop():
    text = AnswerText(Spelling(["ab", "c"], tail="d"), ("b",))
    assert (text.push(0), text.stopped) == ("a", True)
    assert (text.push(1), text.finish()) == ("", "")
