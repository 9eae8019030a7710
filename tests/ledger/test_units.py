"""Sizes as people write them: decimal and binary are never taken for each other."""

import pytest

from jaxkv.ledger import UNITS, LedgerError, parse_bytes, parse_rate, parse_tokens


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("79.6GB", 79_600_000_000),
        ("0.1GB", 10**8),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("512", 512),
        ("2TB", 2 * 10**12),
    ],
)
def test_bytes_are_read_in_the_unit_they_name(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text, message",
    [
        ("80G", "'80G' may be GB or GiB: write one of them"),
        ("80k", "'80k' may be KB or KiB"),
        ("80Q", "no unit 'Q'; there are B, kB"),
        ("-80GB", "is not a size"),
        ("", "is not a size"),
        ("1e9", "is not a size"),
        ("0GB", "must be at least 1 byte"),
        ("9" * 20 + "TB", "at most 1 EiB"),
        ("9" * 40, "is not a size"),
    ],
)
def test_other_sizes_are_refused(text, message):
    with pytest.raises(LedgerError, match=message):
        parse_bytes(text)


def test_tokens_are_counted_in_powers_of_two():
    assert [parse_tokens(x) for x in ("4k", "32K", "1m", "4096", "32000")] == [
        4_096,
        32_768,
        1 << 20,
        4_096,
        32_000,
    ]


@pytest.mark.parametrize("text", ["4q", "-4", "0", "1.5k", "", "k", "4kB", "9" * 15 + "m"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(LedgerError, match="token"):
        parse_tokens(text)


def test_rates_and_units():
    assert (parse_rate("400T"), parse_rate("1.5P"), parse_rate("7")) == (4e14, 1.5e15, 7.0)
    for text in ("0T", "x", "-1T", "1e400"):
        with pytest.raises(LedgerError, match="is not a rate"):
            parse_rate(text)
    assert (UNITS["GiB"], UNITS["GB"]) == (2**30, 10**9)
