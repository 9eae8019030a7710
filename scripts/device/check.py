"""Check and time the GPU kernel on the GPU that is here, in one bounded run.

  python scripts device check
  python scripts device check --minutes 3 --json check.json --no-model

The check first compares each named shape with the `reference` backend, and tests some properties.
Then it times decode attention and the other systems that are installed: median time on the device,
bytes of live K and V per second, and their share of what a plain copy reaches. Each load is much
larger than an L2 cache. Last it times decode steps of SmolLM2. A row that does not fit into the
minutes, or a system that is missing, has a row that says so. Faults are printed at once, the table
at the end in any case, and rows are saved to the JSON file as they are found.

A separate process uses the device. If a kernel hangs or ends it, that is the result of the row, and
another process continues with the next one.

Without a GPU the kernel is simulated on toy sizes and nothing is timed: then the run checks only
the program itself.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.cli import console

COMMAND = (sys.executable, "-m", "scripts.device.worker")
ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"correct": 60.0, "copy": 60.0, "decode": 60.0, "model": 120.0}  # limit for one answer
SIMULATED = 10  # factor on SECONDS without a GPU
START_SECONDS = 120.0
MODEL_MINUTES = 1.5  # reserved for the model's steps
Found = dict[str, Any]  # the cells of a row


class Lost(Exception):
    """The process that uses the device has stopped answering; the message says why."""


class Worker:
    """The process that uses the device; see `scripts/device/worker.py`."""

    def __init__(self, command: Sequence[str]):
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # so that its children, such as compilers, end with it
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the end of the output

    def answer(self, seconds: float) -> Found:
        """Returns the next line of the process, after at most `seconds`.

        Raises:
          Lost: no line came; the process has been ended.
        """
        try:
            line = self._lines.get(timeout=max(seconds, 0))
        except queue.Empty:
            self.close()
            raise Lost(f"no answer in {seconds:.0f} s") from None
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().rpartition("\n")[2][:160]
        self.close()
        raise Lost(f"the process ended with {code}: {last}".removesuffix(": "))

    def ask(self, section: str, name: str, system: str, seconds: float) -> Found:
        """Returns the cells of a row.

        Raises:
          Lost: see `answer`.
        """
        assert self._process.stdin is not None
        question = json.dumps(dict(section=section, name=name, system=system))
        with contextlib.suppress(OSError):  # the process has ended, and `answer` will raise Lost
            print(question, file=self._process.stdin, flush=True)
        return self.answer(seconds)

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(OSError):  # the worker has not read the question
                stream.close()


@dataclass
class Report:
    """The rows found so far.

    Attributes:
      path: path of the JSON file.
      device, versions: the device and the package versions of the run.
    """

    path: Path
    device: str = "nothing"
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    saved: bool = True

    def add(self, section: str, name: str, system: str, found: Found) -> None:
        """Adds a row, prints it if jaxkv's kernel failed, and saves all rows."""
        self.rows.append(dict(section=section, name=name, system=system, **found))
        if found.get("failed") and system == "mosaic_gpu":
            print(f"FAILED: {section} {name}: {found['reason']}", flush=True)
        shown = dict(device=self.device, versions=self.versions, rows=self.rows)
        try:
            self.path.write_text(json.dumps(shown, indent=1) + "\n")
        except OSError as error:  # the table is still printed
            if self.saved:
                print(f"{self.path}: {error.strerror}; rows are not saved", file=sys.stderr)
            self.saved = False

    @property
    def failed(self) -> bool:
        """Whether a row of jaxkv's kernel failed."""
        return any(row.get("failed") and row["system"] == "mosaic_gpu" for row in self.rows)

    @property
    def copied(self) -> float | None:
        """Bytes per second of the copy; None if it was not timed."""
        rows = (row.get("bytes_per_second") for row in self.rows if row["section"] == "copy")
        return next(rows, None)


@dataclass
class Run:
    """Asks for one row after another, and starts a new worker after one is lost.

    Attributes:
      report: receives the rows.
      deadline: end of the run, in seconds of `time.monotonic`.
      command: command that starts a worker.
      real: there is a GPU.
    """

    report: Report
    deadline: float
    command: Sequence[str]
    real: bool = False
    _worker: Worker | None = None

    def start(self, seconds: float = START_SECONDS) -> Worker:
        """Starts a worker, which must answer within `seconds`.

        Raises:
          Lost: it does not start, or it lacks the GPU that the previous worker had.
        """
        worker = Worker(self.command)
        found = worker.answer(seconds)
        if self.real and not found["real"]:
            worker.close()
            raise Lost("JAX no longer sees the GPU")
        self._worker, self.real = worker, found["real"]
        self.report.device, self.report.versions = found["device"], found["versions"]
        return worker

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def ask(self, section: str, name: str, system: str, reserve: float) -> None:
        """Adds a row; it is measured only if more than `reserve` seconds are left."""
        if self.left <= reserve:
            found: Found = dict(reason="no time was left")
        else:
            try:
                worker = self._worker or self.start(min(START_SECONDS, self.left))
                seconds = SECONDS[section] * (1 if self.real else SIMULATED)
                found = worker.ask(section, name, system, min(seconds, self.left))
                if found.pop("last", False):
                    self.close()
            except Lost as error:
                self._worker = None
                found = dict(reason=str(error), failed=self.left > 0)
        if section == "decode" and self.report.copied and "bytes_per_second" in found:
            found["share_of_copy"] = found["bytes_per_second"] / self.report.copied
        self.report.add(section, name, system, found)

    def close(self) -> None:
        """Ends the worker, if there is one."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The command line."""

    minutes: float
    json: Path
    no_model: bool


def parse(argv: list[str]) -> CheckOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts device check", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=6, help="time limit of the run (default: %(default)s)")
    add(
        "--json",
        type=Path,
        default=Path(f"device_check_{time.strftime('%Y%m%d-%H%M%S')}.json"),
        metavar="PATH",
        help="where rows are saved (default: a new file, device_check_DATE-TIME.json)",
    )
    add("--no-model", action="store_true", help="leave out the model's steps")
    options = parser.read(CheckOptions, argv)
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes must be above 0 and finite, not {options.minutes}")
    return options


def main(argv: list[str]) -> int:
    """Runs the check; returns 1 if a result of jaxkv's kernel was wrong or missing."""
    options = parse(argv)
    with options.json.open("a"):
        pass  # fails before anything runs if the file cannot be written
    from scripts.device.worker import questions

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    report = Report(options.json)
    run = Run(report, time.monotonic() + 60 * options.minutes, COMMAND)
    try:
        run.start()
        if not run.real:
            print("JAX sees no GPU: simulated on toy sizes, nothing is timed", file=sys.stderr)
        asked = [one for one in questions(run.real) if one[0] != "model" or not options.no_model]
        ask_all(run, asked, options.minutes)
    except Lost as error:
        print(f"FAILED: the process that uses the device: {error}")
        return 1
    finally:
        run.close()
        print(table(report))
    return int(report.failed)


def ask_all(run: Run, asked: Iterable[tuple[str, str, str]], minutes: float) -> None:
    """Asks for all rows; half of the time is kept for timing, part of it for the model."""
    asked = list(asked)
    has_model = any(section == "model" for section, *_ in asked)
    for_model = 60 * min(MODEL_MINUTES, minutes / 4) if has_model else 0.0
    reserves = {"correct": max(for_model, 30 * minutes), "model": 0.0}
    with console.progress(len(asked), unit="row", description="checking") as bar:
        for question in asked:
            bar.set_description(question[0])
            run.ask(*question, reserve=reserves.get(question[0], for_model))
            bar.update()


def table(report: Report) -> str:
    """Returns all rows as Markdown, after a line with the date, device and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {report.device}, {versions}",
        "",
        "| | case | system | time, us | GB/s | of copy | tokens/s | off by | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        off = row.get("error", row.get("off"))
        reason = row.get("reason", "").replace("|", "/")
        cells = [
            row["section"],
            row["name"],
            row["system"],
            _shown(row.get("seconds"), 1e6, ".1f"),
            _shown(row.get("bytes_per_second"), 1e-9, ".0f"),
            _shown(row.get("share_of_copy"), 1, ".0%"),
            _shown(row.get("tokens_per_second"), 1, ".0f"),
            _shown(off, 1, ".1e"),
            f"FAILED: {reason}" if row.get("failed") else reason or row.get("clock", ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: float | None, factor: float, style: str) -> str:
    return "" if value is None else format(value * factor, style)
