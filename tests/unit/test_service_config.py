"""Service configurations: the samples are good, what is wrong is named, and nothing else than ConfigError comes out."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.config import ConfigError, ServiceConfig
from longprefill.orchestrator.config_file import read_service_config

REPOSITORY = Path(__file__).resolve().parents[2]
GOOD = """
[model]
dir = "models/tiny"
[service]
state_dir = "state"
[[prefill]]
cp = 2
dtype = "fp32"
resources = {GPU = 1}
[[decode]]
count = 2
max_tokens = 1024
"""
HASH = "a" * 64


def read(folder: Path, text: str) -> ServiceConfig:
    file = folder / "service.toml"
    file.write_text(text)
    return read_service_config(file)


def test_fields_defaults_and_relative_paths(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert config.model.dir == str(tmp_path / "models/tiny")
    assert config.model.served_name == "tiny"
    assert config.service.state_dir == str(tmp_path / "state")
    assert [name for name, _ in config.prefill_groups] == ["prefill-0"]
    assert [name for name, _ in config.decode_workers] == ["decode-0", "decode-1"]
    assert config.prefill[0].rank_resources == {"CPU": 1.0, "GPU": 1.0}
    assert config.prefill[0].cluster_settings("m").num_ranks == 2
    assert config.longest_job_tokens == 1024
    assert pickle.loads(pickle.dumps(config)) == config


def test_tenants_share_limits_and_weights(tmp_path: Path) -> None:
    keys = f'[auth]\nkeys = [{{tenant = "a", sha256 = "{HASH}", weight = 2, max_queued = 5}}]\n'
    config = read(tmp_path, GOOD.replace('"state"', '"state"\nmax_queued_per_tenant = 7\nhost = "0.0.0.0"') + keys)
    assert (config.tenant_limit("a"), config.tenant_limit("b")) == (5, 7)
    assert config.tenant_weights == {"a": 2.0}


@pytest.mark.parametrize("sample", sorted((REPOSITORY / "examples/serve").glob("*.toml")), ids=lambda path: path.name)
def test_samples_can_be_read(sample: Path) -> None:
    config = read_service_config(sample)
    assert config.prefill_groups
    assert config.decode_workers


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("cp = 2", "cpp = 2"), "[[prefill]]: cpp is unknown (did you mean cp?): use name, count, cp,"),
        (("cp = 2", "cp = 0"), "[[prefill]] prefill: cp 0: use 1 to 1024"),
        (("cp = 2", 'cp = "2"'), "[[prefill]] cp='2': need a whole number"),
        (("cp = 2", "cp = true"), "[[prefill]] cp=True: need a whole number"),
        (("cp = 2", "cp = 2\nstep_tokens = 100"), "step_tokens=100"),
        (("cp = 2", "cp = 2\ncount = 0"), "count=0: use 1 to"),
        (("GPU = 1", 'GPU = "x"'), "need a table of numbers"),
        (("GPU = 1", "GPU = nan"), "GPU=nan: use 0 or a positive number"),
        (('"fp32"', '"fp16"'), "'fp16' is not one of bf16, fp32"),
        (('dir = "models/tiny"', ""), "[model] dir is missing"),
        (("[model]", "[models]"), "models is unknown (did you mean model?)"),
        (("[[prefill]]", "[prefill]"), "prefill: write each as a table of its own, [[prefill]]"),
        (("[[decode]]", "[[decode]]\nname = 'prefill'"), "two pools have the name 'prefill'"),
        (('"state"', '"state"\nport = 70000'), "[service] port=70000: use 0 to 65535"),
        (('"state"', '"state"\nrequest_timeout_s = inf'), "request_timeout_s=inf"),
        (('"state"', '"state"\nhost = "0.0.0.0"'), "can be reached from other machines: give [auth] keys"),
        (('"state"', '"state"\nhost = "example.org"'), "can be reached from other machines"),
        (('"state"', '"state"\non_disconnect = "drop"'), "on_disconnect='drop': use cancel or continue"),
        (("[[decode]]", "[[prefill]]\nname = 'b'\ncp = 1\n[[decode]]"), "cp=1 and 2 in prefill"),
        (("[[decode]]", "[scheduler]\npolicy = 'lifo'\n[[decode]]"), "policy='lifo' is unknown: use guarded"),
        (("[[decode]]", "[auth]\nkeys = [{tenant='a', sha256='xyz'}]\n[[decode]]"), "not 64 hexadecimal digits"),
        (("[[decode]]", f"[auth]\nkeys = [{{tenant='a b', sha256='{HASH}'}}]\n[[decode]]"), "tenant='a b'"),
        (
            (
                "[[decode]]",
                f"[auth]\nkeys = [{{tenant='a', sha256='{HASH}'}}, {{tenant='b', sha256='{HASH}'}}]\n[[decode]]",
            ),
            "two keys have the same sha256",
        ),
        (("[model]", "[model"), "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, GOOD.replace(*change))
    assert said in str(refused.value)
    assert str(tmp_path / "service.toml") in str(refused.value)
    assert HASH not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("absent.toml", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_service_config(tmp_path / name)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_service_config(tmp_path / "binary")


VALUES = st.sampled_from(
    ["0", "-1", "1e400", "nan", "''", "'x'", "true", "[]", "[1]", "{}", "{a=1}", "99999999999999999999"]
)
NAMES = st.sampled_from(
    ["dir", "name", "state_dir", "host", "port", "cp", "tp", "dtype", "count", "max_tokens", "resources", "policy",
     "keys", "backends", "device", "step_tokens", "step_target_s", "certificate", "max_queued", "ray_address"]
)  # fmt: skip
HEADERS = st.sampled_from(["[model]", "[service]", "[tls]", "[auth]", "[[prefill]]", "[[decode]]", "[scheduler]", ""])


@settings(max_examples=150)
@given(st.lists(st.tuples(HEADERS, st.dictionaries(NAMES, VALUES, max_size=4)), max_size=6))
def test_garbage_is_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, tables: list[tuple[str, dict[str, str]]]
) -> None:
    text = "\n".join(
        header + "\n" + "\n".join(f"{name} = {value}" for name, value in body.items()) for header, body in tables
    )
    with contextlib.suppress(ConfigError):
        read(tmp_path_factory.getbasetemp(), text)
