"""The vocabulary: plans, settings, rank variables, units, errors, files."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core import env
from farandole.core.rank_variables import read_rank_variables
from farandole.core.vocabulary import units
from farandole.core.vocabulary.config import parse_settings
from farandole.core.vocabulary.errors import CommError, ConfigError, FarandoleError, Mismatch, PlanError
from farandole.core.vocabulary.run_files import Crash, crash_path, hide_secrets, read_crashes, write_private
from farandole.core.vocabulary.spec import Plan
from farandole.core.vocabulary.text import did_you_mean


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_plan_survives_toml_and_json(tmp_path: Path) -> None:
    plan = Plan(bucket_bytes=123, accumulate=3, clip_norm=0.5, sync_batch_norm=True, buffers="local")
    assert Plan.read(write(tmp_path / "plan.toml", plan.to_toml())) == plan
    assert Plan.read(write(tmp_path / "plan.json", json.dumps(plan.to_mapping()))) == plan
    assert Plan().differences(plan)["accumulate"] == (1, 3)


def test_a_plan_understands_units() -> None:
    plan = Plan.from_mapping({"bucket_bytes": "8MiB", "timeout_seconds": "5m", "clip_norm": "none"}, where="x")
    assert (plan.bucket_bytes, plan.timeout_seconds, plan.clip_norm) == (8 << 20, 300.0, None)


@pytest.mark.parametrize("given", ["blocks", ["layers.*", "head"], '["layers.*", "head"]'])
def test_what_is_recomputed_is_a_word_or_a_list(tmp_path: Path, given: object) -> None:
    plan = Plan.from_mapping({"recompute": given}, where="x")
    assert plan.recompute == ("blocks" if given == "blocks" else ("layers.*", "head")), plan
    assert Plan.read(write(tmp_path / "plan.toml", plan.to_toml())) == plan, "TOML has lost something"
    assert Plan.read(write(tmp_path / "plan.json", json.dumps(plan.to_mapping()))) == plan, "JSON has"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bucket_byte": 1}, "x: unknown key 'bucket_byte'; did you mean 'bucket_bytes'?"),
        ({"accumulate": "many"}, "x: accumulate: expected a whole number, got 'many'"),
        ({"accumulate": 1.5}, "x: accumulate: expected a whole number, got 1.5"),
        ({"accumulate": True}, "x: accumulate: expected a whole number, got True"),
        ({"accumulate": 0}, "accumulate = 0, expected at least 1"),
        ({"congestion_control": "cubic; rm"}, 'congestion_control = "cubic; rm", expected a name such as cubic'),
        ({"congestion_control": "a" * 16}, "expected a name such as cubic or bbr"),
        ({"clip_norm": -1}, "clip_norm = -1.0, expected a positive number"),
        ({"clip_norm": "nan"}, "clip_norm = nan, expected a positive number"),
        ({"buffers": "max"}, "x: buffers: expected one of 'mean', 'local', got 'max'"),
        ({"sync_batch_norm": "maybe"}, "x: sync_batch_norm: expected true or false, got 'maybe'"),
        ({"timeout_seconds": 0}, "timeout_seconds = 0.0"),
        ({"recompute": "block"}, "x: recompute: expected one of 'none', 'blocks' or a list of texts, got 'block'"),
        ({"recompute": "[1]"}, "x: recompute: expected one of 'none', 'blocks' or a list of texts, got '[1]'"),
        ({"precision": "int8"}, "x: precision: expected one of 'fp32', 'bf16', 'fp16', got 'int8'"),
        ({"precision": "fp16", "nonfinite": "skip"}, 'nonfinite = "skip" with precision = "fp16", which skips'),
        ({"bf16_parameters": True}, 'bf16_parameters = true with precision = "fp32"'),
        ({"recompute": []}, "plan: recompute = [], expected patterns of module names"),
        ({"version": 2}, "plan version 2 is newer than 1"),
        ({"version": 2, "unheard_of": 1}, "plan version 2 is newer than 1"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(values: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping(values, where="x")
    assert text in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_constructor_reads_what_a_file_may_have() -> None:
    assert Plan(offload="disk", offload_directory=Path("/a/b")).offload_directory == "/a/b"  # type: ignore[arg-type]
    made = Plan(bucket_bytes="25 MiB", zero="2", clip_norm="none", timeout_seconds=5, recompute=["layers.*"])  # type: ignore[arg-type]
    keys: dict[str, Any] = {
        "bucket_bytes": 25 * 2**20,
        "zero": 2,
        "timeout_seconds": 5.0,
        "recompute": ("layers.*",),
    }
    assert made == Plan(**keys)
    assert {name: getattr(made, name) for name in keys} == keys
    assert type(made.timeout_seconds) is float


def test_a_size_of_buckets_that_is_left_open_follows_the_device() -> None:
    assert [Plan().with_bucket_bytes(on_device=each).bucket_bytes >> 20 for each in (False, True)] == [4, 25]
    said = Plan(bucket_bytes=4 << 20)
    assert said.with_bucket_bytes(on_device=True) is said


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bucket_bytes": -1}, "plan: bucket_bytes = -1, expected at least 0"),
        (
            {"bucket_bytes": "many"},
            "plan: bucket_bytes: expected a whole number of bytes, such as 4MiB, got 'many'",
        ),
        ({"bucket_bytes": 1.5}, "plan: bucket_bytes: expected a whole number of bytes, such as 4MiB, got 1.5"),
        ({"accumulate": True}, "plan: accumulate: expected a whole number, got True"),
        ({"lossy": "perhaps"}, "plan: lossy: expected true or false, got 'perhaps'"),
        ({"precision": "int8"}, "plan: precision: expected one of 'fp32', 'bf16', 'fp16', got 'int8'"),
        ({"codec": None}, "plan: codec: expected text, got None"),
        ({"codec_for": 5}, "plan: codec_for: expected a table of texts, got 5"),
        ({"sync": 3}, "plan: sync: expected text, got 3"),
        ({"balance": [2, 1]}, "plan: balance: expected text, got [2, 1]"),
        (
            {"timeout_seconds": object},
            "plan: timeout_seconds: expected seconds from 0, such as 600 or 10m, got <class 'object'>",
        ),
    ],
)
def test_the_constructor_refuses_values_of_other_types(values: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**values)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ['{"*"="rows"}', '{"*" = "rows"}', '{"*": "rows"}', "{ '*' = 'rows' }"],
)
def test_a_table_on_the_command_line_is_json_or_toml(text: str) -> None:
    plan = Plan.from_mapping({"tensor": "2", "tensor_recipe": text}, where="--set")
    assert plan.tensor_recipe == {"*": "rows"}
    for words in ('["a", "b"]', "['a', 'b']"):
        cuts = Plan.from_mapping({"pipeline": "3", "pipeline_cuts": words}, where="--set").pipeline_cuts
        assert cuts == ("a", "b")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("plan.toml", "accumulate = = 2", "is not TOML"),
        ("plan.json", "{", "is not JSON"),
        ("plan.json", "[1]", "holds a list, expected a table"),
        ("plan.toml", None, "there is no file .*plan.toml; farandole plan ... --out FILE writes one"),
    ],
)
def test_an_unreadable_plan(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(PlanError, match=text):
        Plan.read(tmp_path / name)


def test_settings() -> None:
    assert parse_settings(["a=1", "b = x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_settings(["accumulate"])


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8))))
def test_any_mapping_is_a_plan_or_a_plan_error(values: dict[str, object]) -> None:
    with contextlib.suppress(PlanError):
        assert isinstance(Plan.from_mapping(values, where="x"), Plan)


TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "7",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCH, ("torch", 3, 4, 1, 2, 1, 2, "a", 7)),
        ({**TORCH, "GROUP_RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
         ("torch", 3, 4, 1, 2, 0, 2, "a", 7)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
         ("Open MPI", 1, 2, 1, 2, 0, 1, "127.0.0.1", None)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
          "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "2"}, ("horovod", 1, 4, 1, 2, 0, 2, None, None)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1",
          "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2"}, ("Slurm", 5, 8, 1, 4, 1, 2, None, None)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("PMI", 0, 1, 0, 1, 0, 1, None, None)),
    ],
)  # fmt: skip
def test_rank_variables_of_each_launcher(variables: dict[str, str], expected: tuple[object, ...]) -> None:
    place = read_rank_variables(variables)
    assert place is not None
    assert (
        place.source, place.rank, place.size, place.local_rank, place.local_size, place.node_rank,
        place.node_count, place.address, place.port,
    ) == expected  # fmt: skip


def test_a_batch_script_under_slurm_is_no_rank() -> None:
    assert read_rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) is None
    assert read_rank_variables({}) is None


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: the rank must be below"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected at least 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: expected at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "no"}, "MASTER_PORT='no'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "FARANDOLE_RANK": "1", "FARANDOLE_SIZE": "2"},
         "FARANDOLE_RANK=1 and RANK=0 contradict each other"),
    ],
)  # fmt: skip
def test_rank_variables_that_make_no_sense(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_variables(variables)
    assert text in str(caught.value)


def test_torchruns_agent_serves_the_store() -> None:
    place = read_rank_variables({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert place is not None
    assert place.store_is_served


@pytest.mark.parametrize(
    ("text", "count"), [("25MiB", 25 << 20), ("25m", 25 << 20), ("1.5GB", 1_500_000_000), ("7", 7), ("2 kB", 2000)]
)
def test_bytes(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "x", "5 parsecs", "-1", "1e9 B"])
def test_bytes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of bytes"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00084, "840 µs"), (0.0123, "12.3 ms"), (4.2, "4.2 s"), (185, "3:05"), (7385, "2:03:05"),
     (float("nan"), "unknown"), (-2, "-2 s")],
)  # fmt: skip
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


def test_counts_for_people() -> None:
    assert [units.format_bytes(n) for n in (12, 4_200_000, 102_000_000_000)] == ["12 B", "4.2 MB", "102 GB"]
    assert [units.format_rate(n) for n in (9.5, 12_300, 4_500_000)] == ["9.5", "12.3k", "4.5M"]


@pytest.mark.parametrize(
    ("text", "rate"),
    [("8kbit", 8e3), ("8000bit", 8e3), ("200mbit", 2e8), (" 1.5 Gbit ", 1.5e9), ("400GBIT", 4e11),
     ("1kB/s", 8e3), ("25MB/s", 2e8), ("2gb/s", 1.6e10)],
)  # fmt: skip
def test_rates_of_links(text: str, rate: float) -> None:
    assert units.parse_bits_per_second(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "200", "200mb", "200 mbits", "-1mbit", "1e3mbit", "mbit", "1,5mbit"])
def test_rates_of_links_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_bits_per_second(text)
    assert str(caught.value) == f"{text!r} is not a rate such as 200mbit or 1gbit"


@pytest.mark.parametrize("text", ["0mbit", "7.9kbit", "401gbit", f"{'9' * 400}gbit"])
def test_rates_of_links_that_no_link_has(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_bits_per_second(text)
    assert str(caught.value) == f"{text!r} is not a rate between 8kbit and 400gbit"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(4e11, "400 Gbit/s"), (1e9, "1 Gbit/s"), (2e8, "200 Mbit/s"), (1.25e6, "1.25 Mbit/s"), (8e3, "8 kbit/s"),
     (12, "12 bit/s")],
)  # fmt: skip
def test_rates_of_links_for_people(rate: float, text: str) -> None:
    assert units.format_bits_per_second(rate) == text


@given(st.floats(8e3, 4e11))
def test_a_rate_survives_being_written_for_people(rate: float) -> None:
    text = units.format_bits_per_second(rate).replace("it/s", "it")
    assert units.parse_bits_per_second(text) == pytest.approx(rate, rel=1e-3)


def test_names() -> None:
    assert did_you_mean("zzz", ["a", "b"]) == "known: a, b"
    assert did_you_mean("tset", ["set", "test"]) == "did you mean 'test'?", "two letters that changed places"
    assert did_you_mean("trian", ["demo", "train", "trial"]) == "did you mean 'train'?"


def test_errors_carry_their_facts_through_pickle() -> None:
    error = Mismatch("shapes differ", rank=3, operation="all-reduce", bucket=2, remedy="look")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "rank 3, all-reduce of bucket 2: shapes differ; look"
    assert (again.rank, again.bucket, again.exit_code) == (3, 2, 1)
    assert isinstance(again, CommError)
    assert isinstance(again, FarandoleError)


def test_private_files_and_crashes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_private(path, "x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for rank, what in ((1, "from 1"), (0, "from 0"), (1, "because of it")):
        try:
            raise ValueError(what)
        except ValueError as error:
            Crash.from_exception(
                error, error.__traceback__, rank=rank, host="h", step=4, ours=False, consequence=False, exit_code=1
            ).write(tmp_path)
    crash_path(tmp_path, 7).write_text("{broken")
    crash_path(tmp_path, 8).write_text('{"rank": 8}')
    crashes = read_crashes(tmp_path)
    assert [crash.message for crash in crashes] == ["from 1", "from 0"], "the first account of a rank stays"
    assert "ValueError: from 1" in crashes[0].traceback


@pytest.mark.parametrize(
    "word",
    [
        "--tokenizer",
        "--tokens=a.bin",
        "--tokens_per_batch=8",
        "--num-tokens=5",
        "--detokenize",
        "s3://b/x",
        "a@b",
        "--pad_token_id",
        "--eos_token",
        "--num_token",
        "--token-file",
        "--use-auth-token",
        "a@h:~/x",
    ],
)
def test_what_is_no_secret_is_shown(word: str) -> None:
    assert hide_secrets([word, "value"]) == [word, "value"]


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["--hf_token=a b"], ["--hf_token=***"]),
        (["+wandb.api_key=3"], ["+wandb.api_key=***"]),
        (["--aws-secret-access-key", "k", "k"], ["--aws-secret-access-key", "***", "k"]),
        (["--accessToken", "v"], ["--accessToken", "***"]),
        (["--use-auth-token", "--lr", "1"], ["--use-auth-token", "--lr", "1"]),
        (["https://u:pw@h/x"], ["https://***@h/x"]),
        (["https://ghp_abc@h/x?token=a&b=c"], ["https://***@h/x?token=***&b=c"]),
        (["--env=HF_TOKEN=a"], ["--env=HF_TOKEN=***"]),
        (["--export=ALL,WANDB_API_KEY=a"], ["--export=ALL,WANDB_API_KEY=***"]),
        (["--set", "a=b,password=x"], ["--set", "a=b,password=***"]),
        (['{"api_key": "a", "lr": 1}'], ['{"api_key": ***, "lr": 1}']),
        (["-H", "Authorization: Bearer a"], ["-H", "Authorization: Bearer ***"]),
        (['x --token="a b" z'], ["x --token=*** z"]),
        (["cd x;HF_TOKEN=a run --passwd b --lr 3"], ["cd x;HF_TOKEN=*** run --passwd *** --lr 3"]),
        (["-c", "HF_TOKEN=a python t.py"], ["-c", "HF_TOKEN=***"]),
    ],
)
def test_secrets_of_a_command_are_hidden(words: list[str], hidden: list[str]) -> None:
    assert hide_secrets(words) == hidden


def test_a_link_beside_a_private_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".told.{os.getpid()}").symlink_to(victim)
    write_private(tmp_path / "told", "said")
    assert ((tmp_path / "told").read_text(), victim.read_text()) == ("said", "mine")


def test_defaults_of_the_environment_give_way_to_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_USER", "theirs")
    monkeypatch.delenv("NOT_SET", raising=False)
    with env.default_environment({"SET_BY_USER": "ours", "NOT_SET": "ours"}):
        assert env.set_variables(("SET_BY_USER", "NOT_SET")) == {"SET_BY_USER": "theirs", "NOT_SET": "ours"}
    assert env.set_variables(("SET_BY_USER", "NOT_SET")) == {"SET_BY_USER": "theirs"}


def test_an_empty_variable_names_nothing() -> None:
    assert env.set_variables(("A", "B", "C"), {"A": "", "B": "b"}) == {"B": "b"}
    assert env.read_ray_address({"RAY_ADDRESS": ""}) is None
    assert env.read_ray_address({"RAY_ADDRESS": "host:1"}) == "host:1"
    assert not env.color_is_allowed({"NO_COLOR": ""}), "no-color.org of old: set to whatever"
    assert env.color_is_allowed({})
