"""Wrong calls of `longprefill run`: one line that names the value and the way out, exit code 2, nothing started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from .support.command import Finished, run
from .support.models import make_model
from .support.refusals import RefusalServer

TEXT = "A prompt of a few words.\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hybrid", "longprefill_hybrid", max_position_embeddings=4096)


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model to break."""
    return shutil.copytree(model, tmp_path / "broken")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[RefusalServer]:
    server = RefusalServer()
    yield server
    server.close()


@pytest.fixture
def refusal(server: RefusalServer) -> Callable[..., str]:
    """Runs `longprefill run` with these arguments; the line with which it refuses them."""

    def refused(*arguments: object, stdin: bytes = b"") -> str:
        return refused_line(server.run("run", *arguments, stdin=stdin))

    return refused


def refused_line(finished: Finished) -> str:
    assert finished.code == 2, finished
    assert finished.out == ""
    return finished.line


Refusal = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cp", 0], ["--cp 0", "1 to 1024"]),
        (["--cp", -2], ["--cp -2"]),
        (["--cp", "two"], ["--cp two", "integer"]),
        (["--temperature=hot"], ["--temperature=hot"]),
        (["--cp", 500], ["--cp 500", "GiB", "--cp ", "or less"]),
        (["--cp", 2000], ["--cp 2000", "1 to 1024"]),
        (["--tp", 0], ["--tp 0"]),
        (["--max-new-tokens", 0], ["0", "at least 1"]),
        (["--max-new-tokens", -1], ["-1", "at least 1"]),
        (["--max-new-tokens", 4096], ["4096", "maximum"]),
        (["--step-tokens", -64], ["-64", "multiple of 64"]),
        (["--step-tokens", 0], ["0", "multiple of 64"]),
        (["--step-tokens", 100], ["100", "--step-tokens 64 or 128"]),
        (["--dtype", "fp16"], ["fp16", "bf16, fp32"]),
        (["--latent-format", "fp4"], ["fp4", "bf16", "fp8"]),
        (["--index-format", "fp8"], ["fp8", "mxfp8"]),
        (["--layout", "striped"], ["striped", "zigzag, contiguous"]),
        (["--temperature", -1], ["-1", "greedy"]),
        (["--temperature", "nan"], ["nan"]),
        (["--top-p", 0], ["top_p=0", "(0, 1]"]),
        (["--top-p", 1.5], ["1.5"]),
        (["--seed", -1], ["-1"]),
        (["--stop", ""], ["--stop"]),
        (["--unknown", 1], ["--unknown", "longprefill run --help"]),
    ],
)
def test_options(refusal: Refusal, model: Path, prompt: Path, arguments: list[object], words: list[str]) -> None:
    line = refusal("--model", model, "--prompt", prompt, *arguments)
    assert all(word in line for word in words), line


def test_missing_options(refusal: Refusal, model: Path) -> None:
    assert "--prompt" in refusal("--model", model)


def test_no_such_model(refusal: Refusal, tmp_path: Path, prompt: Path) -> None:
    assert str(tmp_path / "absent") in refusal("--model", tmp_path / "absent", "--prompt", prompt)


def test_model_is_a_file(refusal: Refusal, prompt: Path) -> None:
    assert str(prompt) in refusal("--model", prompt, "--prompt", prompt)


def test_unknown_model_type(refusal: Refusal, broken: Path, prompt: Path) -> None:
    change_config(broken, model_type="gpt2")
    line = refusal("--model", broken, "--prompt", prompt)
    assert "gpt2" in line
    assert "kimi_linear, longprefill_hybrid" in line


def test_config_is_no_json(refusal: Refusal, broken: Path, prompt: Path) -> None:
    (broken / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in refusal("--model", broken, "--prompt", prompt)


def test_config_is_missing(refusal: Refusal, broken: Path, prompt: Path) -> None:
    (broken / "config.json").unlink()
    assert "config.json is missing" in refusal("--model", broken, "--prompt", prompt)


def test_weights_are_missing(refusal: Refusal, broken: Path, prompt: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal("--model", broken, "--prompt", prompt)


def test_weights_are_truncated(refusal: Refusal, broken: Path, prompt: Path) -> None:
    path = broken / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    line = refusal("--model", broken, "--prompt", prompt)
    assert "truncated" in line
    assert str(path) in line


def test_a_tensor_is_missing(refusal: Refusal, broken: Path, prompt: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    assert "no tensor model.norm.weight" in refusal("--model", broken, "--prompt", prompt)


def test_a_tensor_has_another_shape(refusal: Refusal, broken: Path, prompt: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, broken / "model.safetensors")
    line = refusal("--model", broken, "--prompt", prompt)
    assert "[63]" in line
    assert "[64]" in line


def test_no_such_prompt(refusal: Refusal, model: Path, tmp_path: Path) -> None:
    assert "absent.txt does not exist" in refusal("--model", model, "--prompt", tmp_path / "absent.txt")


def test_prompt_is_a_directory(refusal: Refusal, model: Path, tmp_path: Path) -> None:
    assert "directory" in refusal("--model", model, "--prompt", tmp_path).lower()


@pytest.mark.parametrize("name", ["empty.txt", "empty.ids", "empty.json"])
def test_empty_prompt(refusal: Refusal, model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]" if name.endswith("json") else "")
    assert "empty" in refusal("--model", model, "--prompt", tmp_path / name)


def test_empty_standard_input(refusal: Refusal, model: Path) -> None:
    assert "standard input is empty" in refusal("--model", model, "--prompt", "-", stdin=b"")


def test_prompt_is_not_utf8(refusal: Refusal, model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    line = refusal("--model", model, "--prompt", tmp_path / "latin.txt")
    assert "0xe9 at offset 3" in line


def test_prompt_is_binary(refusal: Refusal, model: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(range(256)) * 40)
    assert "0x80 at offset 128" in refusal("--model", model, "--prompt", tmp_path / "blob")


@pytest.mark.parametrize("bad", [512, -1, 10**30])
def test_token_outside_the_vocabulary(refusal: Refusal, model: Path, tmp_path: Path, bad: int) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps([5, 6, bad, 7]))
    line = refusal("--model", model, "--prompt", tmp_path / "prompt.json")
    assert "position 2" in line
    assert "511" in line
    assert bad > 10**20 or str(bad) in line


def test_npy_of_floats(refusal: Refusal, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "prompt.npy", np.ones(4, np.float32))
    assert "float32" in refusal("--model", model, "--prompt", tmp_path / "prompt.npy")


def test_prompt_beyond_the_model(refusal: Refusal, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "prompt.npy", np.full(5000, 9))
    line = refusal("--model", model, "--prompt", tmp_path / "prompt.npy")
    assert "5000" in line
    assert "4096" in line


def test_text_without_a_tokenizer(refusal: Refusal, broken: Path, prompt: Path) -> None:
    (broken / "tokenizer.json").unlink()
    line = refusal("--model", broken, "--prompt", prompt)
    assert "tokenizer.json is missing" in line
    assert ".ids" in line


def test_damaged_tokenizer(refusal: Refusal, broken: Path, prompt: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not a tokenizer" in refusal("--model", broken, "--prompt", prompt)


@pytest.mark.parametrize("option", ["--json", "--dump", "--trace"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent/out", "no directory"),
        (".", "is a directory"),
        ("/proc/out", "cannot be written"),
        ("a/b", "no directory"),
    ],
)
def test_unwritable_output(
    refusal: Refusal, model: Path, prompt: Path, tmp_path: Path, option: str, name: str, words: str
) -> None:
    line = refusal("--model", model, "--prompt", prompt, option, tmp_path / name)
    assert words in line
    assert line.startswith(option)


def test_parent_of_the_output_is_a_file(refusal: Refusal, model: Path, prompt: Path) -> None:
    assert "--json" in refusal("--model", model, "--prompt", prompt, "--json", prompt / "out")


def test_one_file_for_two_outputs(refusal: Refusal, model: Path, prompt: Path, tmp_path: Path) -> None:
    line = refusal("--model", model, "--prompt", prompt, "--json", tmp_path / "o", "--trace", tmp_path / "." / "o")
    assert "--json" in line
    assert "--trace" in line
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_output_over_the_model(refusal: Refusal, broken: Path, prompt: Path, name: str) -> None:
    before = (broken / name).read_bytes()
    assert "overwrite" in refusal("--model", broken, "--prompt", prompt, "--json", broken / name)
    assert (broken / name).read_bytes() == before


def test_output_over_the_prompt(refusal: Refusal, model: Path, prompt: Path) -> None:
    assert "overwrite" in refusal("--model", model, "--prompt", prompt, "--dump", prompt)
    assert prompt.read_text() == TEXT


def test_a_refusal_keeps_what_an_output_held(refusal: Refusal, model: Path, prompt: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    refusal("--model", model, "--prompt", prompt, "--json", tmp_path / "old.json", "--cp", 0)
    assert (tmp_path / "old.json").read_text() == "old"


def test_wrong_command() -> None:
    assert "prefil" in refused_line(run("prefil"))


def change_config(directory: Path, **fields: object) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | fields))
