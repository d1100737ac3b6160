"""The demo runs end to end, reports what it did, and refuses what cannot work."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "train_gpt.py"
TINY = "--width 32 --depth 1 --heads 2 --context 32 --batch 4 --engine eager"


def run_demo(folder: Path, flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), *flags.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog ate the hat; " * 60)
    finished = run_demo(folder, f"{TINY} --steps 40 --learning-rate 1e-2 --sample 50 --text text.txt --out here/deep")
    assert finished.returncode == 0, finished.stderr
    assert "40/40" in finished.stderr, "no progress bar"
    return finished.stdout


def numbers(output: str, row: str) -> list[float]:
    """The numbers in a row of the table."""
    (line,) = [line for line in output.splitlines() if line.startswith(row)]
    return [float(text) for text in re.findall(r"[-+]?(?:\d+\.?\d*|nan|inf)", line.removeprefix(row))]


def test_both_losses_are_finite_close_and_fell(output: str) -> None:
    bf16, fp8, percent = numbers(output, "validation loss")
    assert all(map(math.isfinite, (bf16, fp8, percent)))
    assert max(bf16, fp8) < 0.75 * math.log(256)
    assert percent == pytest.approx(100 * (fp8 / bf16 - 1), abs=0.02)
    assert abs(percent) < 10
    assert bf16 != fp8, "nothing ran in FP8"


def test_the_table_counts_matmuls_and_bytes(output: str) -> None:
    in_bf16, in_fp8, total = numbers(output, "matmuls in FP8")
    assert in_bf16 == 0
    # a block's four linear layers and the head, three GEMMs each; attention's inner products stay
    assert in_fp8 == 15
    assert total > in_fp8
    high, low, _ = numbers(output, "saved for backward")
    assert 0 < low < high
    parameters = int(re.search(r"([\d,]+) parameters", output)[1].replace(",", ""))  # type: ignore[index]
    for state in numbers(output, "optimizer state")[:2]:  # AdamW: two float32 moments
        assert state == pytest.approx(8 * parameters / 1e6, abs=0.01)


def test_it_says_what_the_default_policy_does(output: str) -> None:
    assert "Policy 'all', one training step:\n  15 of" in output
    default = output.split("The default policy")[1]
    assert re.search(r"0 of \d+ matmuls in FP8", default)
    assert re.search(r"kept: slower on", default)
    assert "attention's inner products" in default


def test_it_writes_the_curves_and_a_sample(output: str, folder: Path) -> None:
    picture = (folder / "here" / "deep" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000
    assert len(re.findall(r"^  \|", output, re.MULTILINE)) >= 1
    assert "| The " in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--width 30 --heads 4", "--width 30 is not a multiple of --heads 4"),
        ("--steps 0", "--steps must be positive, not 0"),
        ("--learning-rate -1", "--learning-rate must be positive, not -1.0"),
        ("--recipe rowise", "invalid choice: 'rowise'"),
        ("--policy some", "invalid choice: 'some'"),
        ("--text nowhere.txt", "--text nowhere.txt cannot be read: No such file"),
        ("--text short.txt", "the text has 11 bytes; its last 10% must hold a validation batch"),
        ("--out short.txt", "--out short.txt is a file; it takes a folder"),
    ],
)
def test_wrong_flags_are_named(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("hello world")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DEMO.parent)
    from train_gpt import parse_arguments

    with pytest.raises(SystemExit) as stopped:
        parse_arguments(flags.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
