"""The demo and the command line: what they make, what they say, and how they refuse."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from rich.console import Console

import hybridloader
from hybridloader import cli
from hybridloader.demo import command, photographs
from hybridloader.demo.comparison import contenders, measure
from hybridloader.demo.display import DemoDisplay
from hybridloader.demo.folders import DemoError, read_class_folders
from hybridloader.demo.images import SIDE, Photographs
from hybridloader.demo.photographs import PHOTOGRAPHS, SIZE, cut_folder, is_complete, prepare
from hybridloader.demo.training import Trainer, cores_left_by

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
    for name, colour in (("blue", (20, 30, 220)), ("red", (220, 30, 20))):
        (tmp_path / name).mkdir()
        for index in range(4):
            Image.new("RGB", (40, 30), colour).save(tmp_path / name / f"{index}.png")
    return tmp_path


def lines() -> tuple[DemoDisplay, io.StringIO]:
    text = io.StringIO()
    return DemoDisplay(Console(file=text, width=100, highlight=False)), text


# --- cutting


def test_a_cut_has_one_folder_per_photograph_and_all_crops(cut: Path) -> None:
    assert len(PHOTOGRAPHS) == 10
    assert photographs.CROPS * len(PHOTOGRAPHS) >= 4000
    assert sorted(os.listdir(cut)) == sorted(PHOTOGRAPHS)
    files = sorted(cut.rglob("*.jpg"))
    assert len(files) == CROPS * len(PHOTOGRAPHS)
    assert len({path.read_bytes() for path in files}) == len(files)
    for path in files[::7]:
        with Image.open(path) as image:
            assert (image.format, image.size) == ("JPEG", SIZE)


def test_cutting_again_gives_the_same_crops(cut: Path, tmp_path: Path) -> None:
    again = prepare(tmp_path, crops=CROPS)
    for path in cut.rglob("*.jpg"):
        assert path.read_bytes() == (again / path.relative_to(cut)).read_bytes()


def test_a_complete_cut_is_not_touched(cut: Path) -> None:
    reports: list[int] = []
    assert prepare(cut.parent, crops=CROPS, report=reports.append) == cut
    assert not reports


@pytest.mark.parametrize("size", [(451, 300), (512, 512), (1411, 1411)])
def test_no_training_crop_looks_at_a_pixel_of_a_heldout_crop(size: tuple[int, int]) -> None:
    boxes = [photographs.crop_box("any", index, size) for index in range(photographs.CROPS)]
    heldout = boxes[9::10]
    train = [box for index, box in enumerate(boxes) if index % 10 != 9]
    assert len(heldout) == 45
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
    assert not any(photographs.overlap(one, other) for one in train for other in heldout)


def test_an_interrupted_cut_leaves_nothing_and_starts_again(tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, crops=CROPS, report=interrupt)
    assert not os.listdir(tmp_path)
    reports: list[int] = []
    assert is_complete(prepare(tmp_path, crops=CROPS, report=reports.append), CROPS)
    assert sum(reports) == CROPS * len(PHOTOGRAPHS)


def test_a_cut_with_a_crop_missing_is_made_again(tmp_path: Path) -> None:
    folder = prepare(tmp_path, crops=2)
    (folder / "cat" / "0001.jpg").unlink()
    assert not is_complete(folder, 2)
    assert is_complete(prepare(tmp_path, crops=2), 2)


def test_a_short_cut_is_never_taken_for_a_whole_one(cut: Path) -> None:
    assert cut_folder(cut.parent) != cut
    assert not is_complete(cut)


def test_what_is_not_the_demos_is_never_removed(tmp_path: Path) -> None:
    folder = cut_folder(tmp_path, 2)
    (folder / "holiday").mkdir(parents=True)
    with pytest.raises(DemoError, match="in the way"):
        prepare(tmp_path, crops=2)
    assert (folder / "holiday").exists()


def test_the_faster_of_two_processes_wins(tmp_path: Path) -> None:
    def other_process(_: int) -> None:
        prepare(tmp_path, crops=1)

    folder = prepare(tmp_path, crops=1, report=other_process)
    assert is_complete(folder, 1)
    assert os.listdir(tmp_path) == [folder.name]


def test_a_photograph_that_is_not_in_its_wheel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PHOTOGRAPHS, "cat", ("skimage", "data/no_cat.png"))
    with pytest.raises(
        DemoError, match=r"can't read the image .*skimage/data/no_cat\.png: No such"
    ):
        prepare(tmp_path)


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cut_folder() == tmp_path / "hybridloader" / "photographs-v1"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cut_folder().is_absolute()


# --- folders and images


def test_every_tenth_image_is_held_out_or_the_last_of_fewer(tmp_path: Path) -> None:
    for name, count in (("many", 25), ("few", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
        for index in range(count):
            (tmp_path / name / f"{index:02d}.JPG").touch()
    (tmp_path / ".hidden").mkdir()
    images = read_class_folders(tmp_path)
    assert images.classes == ("few", "many")
    assert [(Path(path).name, label) for path, label in map(_fields, images.heldout)] == [
        ("02.JPG", 0),
        ("09.JPG", 1),
        ("19.JPG", 1),
    ]
    assert len(images.train) == 2 + 23
    limited = images.limited(5)
    assert len(limited.train) == 5
    assert limited == images.limited(5)
    assert images.limited(100) is images


def _fields(sample: object) -> tuple[str, int]:
    return sample.path, sample.label  # type: ignore[attr-defined]


def test_an_image_becomes_a_tensor_augmented_or_not(cut: Path) -> None:
    images = read_class_folders(cut)
    plain = Photographs(images.train, augment=False)
    varied = Photographs(images.train, augment=True)
    assert len(plain) == (CROPS - 1) * len(PHOTOGRAPHS)
    pixels, label = plain[7]
    assert (pixels.shape, pixels.dtype, label) == ((3, SIDE, SIDE), torch.float32, 1)
    assert torch.equal(pixels, plain[7][0])
    one, other = varied[7][0], varied[7][0]
    assert not torch.equal(one, other)
    assert 0 <= min(one.min(), other.min()) <= max(one.max(), other.max()) <= 1


@pytest.mark.parametrize(
    "backend", ["threads", "fork", "shared-memory", pytest.param("spawn", marks=pytest.mark.full)]
)
def test_the_same_seed_gives_the_same_batches_with_every_backend(cut: Path, backend: str) -> None:
    if backend == "fork" and sys.platform == "win32":
        pytest.skip("no fork here")
    dataset = Photographs(read_class_folders(cut).train, augment=True)

    def batches(name: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loader = hybridloader.DataLoader(
            dataset, batch_size=10, shuffle=True, num_workers=2, backend=name, seeding="worker"
        )
        return [images for images, _ in loader]

    # inline plays two workers, and so is what the others must agree with
    assert all(map(torch.equal, batches(backend), batches("inline")))


# --- training and comparing


def test_the_network_learns(small: Path) -> None:
    torch.manual_seed(0)
    images = read_class_folders(small)
    loader = hybridloader.DataLoader(Photographs(images.train, augment=True), 3, shuffle=True)
    losses: list[float] = []
    trainer = Trainer(2, 10 * len(loader))
    for _ in range(10):
        trainer.train(loader, lambda count, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 4
    unseen = hybridloader.DataLoader(Photographs(images.heldout, augment=False), 2)
    counts: list[int] = []
    assert trainer.correct(unseen, counts.append) == 2
    assert sum(counts) == 2


def test_the_number_of_computing_threads_comes_back() -> None:
    before = torch.get_num_threads()
    with cores_left_by(10_000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_all_backends_are_measured_beside_torchs_loader(cut: Path) -> None:
    dataset = Photographs(read_class_folders(cut).train[:8], augment=True)
    rows = contenders(dataset, batch_size=4, workers=1)
    assert [row.name for row in rows[:2]] == ["torch DataLoader", "inline"]
    assert {row.name for row in rows[1:]} == set(hybridloader.engine.backend_names())
    counts: list[int] = []
    measure(rows, len(dataset), counts.append, rounds=2)
    assert sum(counts) == 8 * 3 * len(rows)
    for row in rows:
        assert row.skipped or (len(row.rates) == 2 and row.rate > 0 and row.first_batch > 0)
    display, text = lines()
    display.table("Loading only", rows)
    for row in rows:
        assert row.name in text.getvalue()


def test_a_backend_that_cant_serve_is_a_note_below_the_table(
    cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object) -> None:
        raise hybridloader.errors.BackendUnavailable("this platform has no fork")

    monkeypatch.setattr(hybridloader.Fork, "check", refuse)
    dataset = Photographs(read_class_folders(cut).train[:4], augment=True)
    rows = [row for row in contenders(dataset, 2, 1) if row.name in ("torch DataLoader", "fork")]
    counts: list[int] = []
    measure(rows, len(dataset), counts.append, rounds=1)
    assert sum(counts) == 4 * 2 * len(rows)
    display, text = lines()
    display.table("Loading only", rows)
    link = "See docs/troubleshooting.md#backendunavailable"
    assert text.getvalue().endswith(f"fork: this platform has no fork\n{link}\n")


def test_without_workers_only_what_needs_none_is_measured(cut: Path) -> None:
    rows = contenders(Photographs(read_class_folders(cut).train, augment=True), 4, 0)
    assert [(row.name, row.workers) for row in rows] == [("torch DataLoader", 0), ("inline", 0)]


# --- the display


def test_a_log_gets_lines_and_a_terminal_gets_a_bar() -> None:
    display, text = lines()
    with display.task("epoch 1", 3) as task:
        task.advance(1, 2.0)
        task.advance(2, 1.0)
    assert re.fullmatch(r"epoch 1 .* 3/3 .* images/s, loss 1.900 *\n", text.getvalue())
    terminal = io.StringIO()
    display = DemoDisplay(Console(file=terminal, force_terminal=True, width=100))
    with display.task("epoch 1", 3) as task:
        task.advance(3, 2.0)
    assert "3/3" in terminal.getvalue()
    assert "loss 2.000" in terminal.getvalue()


# --- the whole, and the command line


def test_the_demo_from_end_to_end(cut: Path) -> None:
    display, text = lines()
    accuracy = command.run(
        data=cut,
        backend="threads",
        workers=2,
        batch_size=16,
        epochs=1,
        compare=False,
        display=display,
    )
    assert 0 <= accuracy <= 1
    said = text.getvalue()
    assert "10 classes, 50 images to train on, 10 held out" in said
    assert re.search("epoch 1 of 1 .* 50/50 ", said)
    assert f"accuracy on held-out images: {accuracy:.1%}" in said


def test_photographs_are_cut_with_a_bar_and_only_once(tmp_path: Path) -> None:
    display, text = lines()
    folder = command.prepared(tmp_path, display, crops=2)
    assert is_complete(folder, 2)
    assert re.match("cutting photographs .* 20/20 ", text.getvalue())
    display, text = lines()
    assert command.prepared(tmp_path, display, crops=2) == folder
    assert not text.getvalue()


def test_the_command_line_trains_and_compares(
    cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--data", str(cut), "--epochs", "1", "--workers", "0", "--limit", "9"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert "9 images to train on, 10 held out" in said.out
    assert "torch DataLoader" in said.out
    assert not said.err
    assert cli.main([*arguments, "--no-compare"]) == 0
    assert "torch DataLoader" not in capsys.readouterr().out


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the demo with `arguments`; it must end with 2 and one line, which is returned."""
    try:
        code: object = cli.main(["demo", "--epochs", "1", "--no-compare", *arguments])
    except SystemExit as end:  # argparse's way
        code = end.code
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("hybridloader demo: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1 + said.count("\nSee docs/")
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
        (["--colour"], "--colour"),
        (["--data", "no/such/folder"], "there is no folder no"),
        (["--data", __file__], "is a file"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(arguments, capsys)


def test_folders_with_too_little_in_them_are_one_line(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(small)]
    (small / "green").mkdir()
    assert f"the class folder {small / 'green'} holds no image" in refusal(data, capsys)
    Image.new("RGB", (8, 8)).save(small / "green" / "0.png")
    assert "holds only one image" in refusal(data, capsys)
    assert "holds no class folders" in refusal(["--data", str(small / "red")], capsys)
    (small / "green" / "0.png").unlink()
    for name in ("blue", "green"):
        (small / name).rename(small / f".{name}")
    assert "holds only one class (red)" in refusal(data, capsys)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_folder_that_may_not_be_read_is_one_line(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "red").chmod(0)
    try:
        assert "can't read the folder" in refusal(["--data", str(small)], capsys)
    finally:
        (small / "red").chmod(0o755)


@pytest.mark.parametrize(
    "backend", ["inline", "threads", "shared-memory", pytest.param("spawn", marks=pytest.mark.full)]
)
def test_an_image_that_a_worker_cant_read_is_one_line_with_its_name(
    small: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = small / "red" / "1.png"
    broken.write_text("no image at all")
    line = refusal(["--data", str(small), "--workers", "2", "--backend", backend], capsys)
    assert f"{broken} is not an image" in line


def test_an_image_that_is_cut_off_is_one_line_with_its_name(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_off = small / "red" / "1.jpg"
    Image.effect_noise((200, 200), 90).save(cut_off)
    cut_off.write_bytes(cut_off.read_bytes()[:4000])
    line = refusal(["--data", str(small), "--workers", "0"], capsys)
    assert f"can't read the image {cut_off}: " in line


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("rich", "skimage") else find(name),
    )
    line = refusal([], capsys)
    assert "needs rich and scikit-image" in line
    assert "pip install 'hybridloader[demo]'" in line


def test_ctrl_c_is_one_line_and_130(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train", interrupt)
    assert cli.main(["demo", "--data", str(small), "--workers", "1"]) == 130
    assert capsys.readouterr().err == "hybridloader demo: interrupted\n"


def test_the_version_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from hybridloader.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'PIL', 'rich', 'loky'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"hybridloader {hybridloader.__version__}\n"


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
    for name, colour in (("blue", (20, 30, 220)), ("red", (220, 30, 20))):
        (tmp_path / name).mkdir()
        for index in range(10):
            Image.new("RGB", (64, 48), colour).save(tmp_path / name / f"{index}.jpg")
    _example().main(tmp_path, epochs=1)
    assert "of 2 held-out images are named rightly" in capsys.readouterr().out
    assert len((ROOT / "examples" / "train_photos.py").read_text().splitlines()) < 100
