"""The demo and the command line: what they make, what they print, and how they refuse."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from support.command import main
from support.programs import output

import hybridloader
from hybridloader import demo
from hybridloader.demo import PHOTOGRAPHS, SIDE, SIZE, Photographs, prepare, read_folder

ROOT = Path(__file__).parents[2]
CROPS = 6

# Forking a process in which torch computes on threads, as every user of torch's loader does, makes
# Python 3.12 and later warn.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("cache"), crops=CROPS)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two classes of four plain images."""
    for name, color in (("blue", (20, 30, 220)), ("red", (220, 30, 20))):
        (tmp_path / name).mkdir()
        for index in range(4):
            Image.new("RGB", (40, 30), color).save(tmp_path / name / f"{index}.png")
    return tmp_path


# --- cutting


def test_a_cut_has_one_folder_per_photograph_and_all_crops(cut: Path) -> None:
    assert len(PHOTOGRAPHS) == 10
    assert demo.CROPS * len(PHOTOGRAPHS) >= 4000
    assert sorted(os.listdir(cut)) == sorted(PHOTOGRAPHS)
    files = sorted(cut.rglob("*.jpg"))
    assert len(files) == CROPS * len(PHOTOGRAPHS)
    assert len({path.read_bytes() for path in files}) == len(files)
    for path in files[::7]:
        with Image.open(path) as image:
            assert (image.format, image.size) == ("JPEG", SIZE)


def test_a_folder_that_cant_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(demo.DemoError, match=r"can't cut photographs into .*file.photographs-v1-6"):
        prepare(tmp_path / "file", crops=CROPS)


def test_cutting_again_gives_the_same_crops(cut: Path, tmp_path: Path) -> None:
    again = prepare(tmp_path, crops=CROPS)
    for path in cut.rglob("*.jpg"):
        assert path.read_bytes() == (again / path.relative_to(cut)).read_bytes()


@pytest.mark.parametrize("size", [(451, 300), (512, 512), (1411, 1411)])
def test_no_training_crop_looks_at_a_pixel_of_a_heldout_crop(size: tuple[int, int]) -> None:
    boxes = [demo.crop_box("any", index, size) for index in range(demo.CROPS)]
    heldout = boxes[9::10]
    train = [box for index, box in enumerate(boxes) if index % 10 != 9]
    assert len(heldout) == 45
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
    assert not any(demo.overlap(one, other) for one in train for other in heldout)


# --- folders and images


def test_every_tenth_image_is_held_out_or_the_last_of_fewer(tmp_path: Path) -> None:
    for name, count in (("many", 25), ("few", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
        for index in range(count):
            (tmp_path / name / f"{index:02d}.JPG").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "README.txt").touch()
    files, train, heldout = read_folder(tmp_path)
    assert files.classes == ["few", "many"]
    assert [(Path(files.paths[index]).name, files.labels[index]) for index in heldout] == [
        ("02.JPG", 0),
        ("09.JPG", 1),
        ("19.JPG", 1),
    ]
    assert len({*train}) == len(train) == 2 + 23
    assert not {*train} & {*heldout}


def test_an_image_becomes_a_tensor_augmented_or_not(cut: Path) -> None:
    files, train, _ = read_folder(cut)
    plain = Photographs(files, train, augment=False)
    assert len(plain) == (CROPS - 1) * len(PHOTOGRAPHS)
    pixels, label = plain[7]
    assert (pixels.shape, pixels.dtype, label) == ((3, SIDE, SIDE), torch.float32, 1)
    assert torch.equal(pixels, plain[7][0])
    augmented = Photographs(files, [train[7]] * 2, augment=True)
    one, other = (
        pixels
        for pixels, _ in iter(
            hybridloader.DataLoader(augmented, None, num_workers=0, seeding="sample")
        )
    )
    assert not torch.equal(one, other)
    assert 0 <= min(one.min(), other.min()) <= max(one.max(), other.max()) <= 1


# --- training


# --- the whole, and the command line


def test_the_demo_from_end_to_end(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    options: dict[str, Any] = {"backend": "threads", "batch_size": 16, "compare": False}
    accuracy = demo.run(data=cut, workers=2, epochs=1, **options)
    assert 0 <= accuracy <= 1
    out = capsys.readouterr().out
    assert "10 classes, 50 images to train on, 10 held out" in out
    assert re.search("epoch 1 of 1: .* images/s, loss ", out)
    assert f"accuracy on held-out images: {accuracy:.1%}" in out
    assert torch.get_num_threads() == threads


def test_the_command_line_trains_and_compares(
    cut: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(demo, "show", lambda images, *given: shown.append((len(images), *given)))
    arguments = ["demo", "--data", str(cut), "--epochs", "1", "--workers", "0", "--limit", "9"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "9 images to train on, 10 held out" in printed.out
    assert not printed.err
    monkeypatch.setattr(demo, "prepare", lambda cache: cut)
    del arguments[1:3]
    assert main([*arguments, "--no-compare"]) == 0
    assert "the first run cuts 4,500 crops" in capsys.readouterr().out
    assert shown == [(9, 1, "threads")]


@pytest.mark.parametrize(
    ("torchs", "ours", "unit", "verdict"),
    [
        ([90.0, 91.0, 89.0], [30.0, 31.0, 29.0], "ms", "3.0 times faster"),
        ([30.0, 31.0, 29.0], [90.0, 91.0, 89.0], "ms", "3.0 times slower"),
        ([90.0] * 3, [30.0] * 3, "MB", "3.0 times less"),
        ([95.0, 96.0, 94.0], [90.0, 91.0, 89.0], "ms", "level: a reason"),
        ([50.0, 99.0, 40.0], [30.0, 41.0, 29.0], "ms", "level: a reason"),
    ],
)
def test_the_table_has_the_median_the_spread_and_a_verdict(
    torchs: list[float],
    ours: list[float],
    unit: str,
    verdict: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = ("a title", unit, ": a reason", lambda values: values.pop(0), [*torchs], [*ours])
    monkeypatch.setattr(demo, "comparisons", lambda *given: [row])
    demo.show(None, 2, "threads")  # type: ignore[arg-type]
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["torch", "hybridloader,", "threads"]
    low, middle, high = sorted(torchs)
    assert line.startswith("a title ")
    assert f"{middle:.0f} {unit} ({low:.0f} to {high:.0f})" in line
    assert line.endswith(f"  {verdict}")


@pytest.mark.full  # 5 s: six comparisons of two loaders each
@pytest.mark.forkserver  # fresh processes: one descriptor stays, for all of them
@pytest.mark.filterwarnings("ignore")  # of workers for which pytest leaves no core, or no fork
def test_each_comparison_measures_both_loaders(cut: Path) -> None:
    files, train, _ = read_folder(cut)
    images = Photographs(files, train[:50], augment=False)
    units = []
    for _, unit, _, function, *both in demo.comparisons(images, 1, "threads"):
        units.append(unit)
        for loader in both:
            assert function(loader) > 0
    memory = ["MB"] if sys.platform == "linux" else []  # elsewhere no file of the kernel has it
    assert units == ["ms"] * 4 + memory + ["ms"]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker")  # torch's forks: `full`
def test_the_comparisons_give_both_loaders_equal_work(
    cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo.Slow(range(5))[3] == 3
    monkeypatch.setattr(demo, "Slow", list)
    monkeypatch.setattr(demo, "TorchLoader", partial(hybridloader.DataLoader, backend="threads"))
    files, train, _ = read_folder(cut)
    rows = demo.comparisons(Photographs(files, train[:8], augment=False), 1, "threads")
    title, unit, _, took, theirs, ours = next(rows)
    assert (title, unit) == ("8 photographs, decoded", "ms")
    assert min(took(theirs), took(ours)) > 0
    assert [labels.tolist() for _, labels in theirs] == [labels.tolist() for _, labels in ours]
    del theirs, ours
    assert [loader.batch_size for *_, loader in islice(rows, 2)] == [64, 16]
    *_, (title, _, _, call, theirs, ours) = rows
    assert title == "resume after 0 of 1 batches"
    assert min(call(theirs), call(ours)) > 0


def test_the_memory_of_workers_is_that_of_all_processes_below_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, children in {os.getpid(): "11 12", 11: "13", 12: "", 13: ""}.items():
        task = tmp_path / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task / "children").write_text(children)
        memory = f"Rss: 9 kB\nPss: {1000 * pid} kB\nPss_Dirty: 5 kB\n"
        (tmp_path / str(pid) / "smaps_rollup").write_text(memory)
    monkeypatch.setattr(demo.system, "PROC", str(tmp_path))
    assert demo.memory(lambda: [0]) == 11 + 12 + 13


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the demo with `arguments`; it must end with 2 and one line, which is returned."""
    try:
        code: object = main(["demo", "--epochs", "1", "--no-compare", *arguments])
    except SystemExit as end:  # argparse's way
        code = end.code
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("hybridloader demo: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1 + said.count("\nSee: ")
    return said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "-1"], "--workers: must be at least 0"),
        (["--workers", "two"], "invalid whole_number value: 'two'"),
        (["--batch-size", "0"], "--batch-size: must be at least 1"),
        (["--epochs", "0"], "--epochs: must be at least 1"),
        (["--limit", "0"], "--limit: must be at least 1"),
        (["--backend", "nope"], "unknown backend 'nope'; there are: inline"),
        (["--color"], "--color"),
        (["--data", "absent"], "absent must hold one folder of images per class"),
        (["--data", str(ROOT / "tests")], "must hold two folders or more, of two images"),
        (["--data", __file__], "must hold one folder of images per class"),
        (["--data", "a [1]"], "no folder with *, ?, [ or { in its path"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(arguments, capsys)


@pytest.mark.parametrize("backend", ["threads", "shared-memory"])
def test_an_image_that_a_worker_cant_read_is_one_line_with_its_name(
    small: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = small / "red" / "1.png"
    broken.write_text("no image at all")
    line = refusal(["--data", str(small), "--workers", "2", "--backend", backend], capsys)
    assert f"can't read the image {broken.as_posix()}: " in line


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("PIL", "skimage") else find(name),
    )
    line = refusal([], capsys)
    assert "needs pillow and scikit-image" in line
    assert "pip install pillow scikit-image" in line


def test_ctrl_c_is_one_line_and_130(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupt)
    assert main(["demo", "--data", str(small), "--workers", "1"]) == 130
    assert capsys.readouterr().err == "hybridloader demo: interrupted\n"


def test_the_version_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from hybridloader.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'PIL', 'rich', 'loky'} & set(sys.modules)\n"
    )
    assert output("-c", program) == f"hybridloader {hybridloader.__version__}\n"


# --- the example


def _example() -> ModuleType:
    path = ROOT / "examples" / "train_photos.py"
    spec = importlib.util.spec_from_file_location("train_photos", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_and_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, color in (("blue", (20, 30, 220)), ("red", (220, 30, 20))):
        (tmp_path / name).mkdir()
        for index in range(10):
            Image.new("RGB", (64, 48), color).save(tmp_path / name / f"{index}.jpg")
    _example().main(tmp_path, epochs=1)
    assert "of 2 held-out images are named rightly" in capsys.readouterr().out
    assert len((ROOT / "examples" / "train_photos.py").read_text().splitlines()) < 100
