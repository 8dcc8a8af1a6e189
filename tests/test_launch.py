"""Launching: Accelerate takes every configuration that is shipped, and those for the CPU start what they say."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

import vanilla_transformer
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, cli
from vanilla_transformer.training import SummedLoss

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "train" / "accelerate"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
FSDP2 = FOLDER / "gpu_8_fsdp2.yaml"
COMMANDS = typer.main.get_command(cli.app).commands
RECIPE = """\
src_lang: row
tgt_lang: reversed
vocab_size: 270
model: {encoder_layers: 1, decoder_layers: 1, d_model: 16, d_ff: 16, num_heads: 2}
batch_tokens: 64
steps: 4
warmup_steps: 2
save_every: 2
"""


def launcher_arguments(path, *options):
    """What `accelerate launch` makes of a configuration."""
    command = ["--config_file", str(path), "--main_process_port", "0", *options, "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    return arguments


@pytest.fixture
def fsdp_environment(monkeypatch):
    """The variables that the FSDP2 configuration gives to every process."""
    variables = prepare_multi_gpu_env(launcher_arguments(FSDP2))
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    variables = {name: value for name, value in variables.items() if name.startswith("FSDP_")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


# What a configuration says


def test_every_way_to_launch_is_there():
    names = {"cpu_2_processes", "gpu_1", "gpu_8_ddp", "gpu_8_fsdp2", "machines_2_gpu_8"}
    assert names == {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_accelerate_takes_every_configuration(path):
    # Refuses keys that it does not know.
    config = load_config_from_file(str(path))
    assert config.mixed_precision in ("no", "bf16", "fp16")
    opening = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))[0]
    assert f"accelerate launch --config_file train/accelerate/{path.name}" in opening


def test_a_misspelt_key_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("distributed_type: MULTI_GPU\nnum_process: 2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="num_process"):
        load_config_from_file(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_keys_below_others_are_arguments_of_the_launcher(path):
    known = vars(launch_command_parser().parse_args(["train.py"]))
    for settings in yaml.safe_load(path.read_text(encoding="utf-8")).values():
        if isinstance(settings, dict):
            assert settings.keys() <= known.keys()


@pytest.mark.parametrize(
    ("name", "kind", "machines", "processes"),
    [
        ("cpu_2_processes", DistributedType.MULTI_GPU, 1, 2),
        ("gpu_1", DistributedType.NO, 1, 1),
        ("gpu_8_ddp", DistributedType.MULTI_GPU, 1, 8),
        ("gpu_8_fsdp2", DistributedType.FSDP, 1, 8),
        ("machines_2_gpu_8", DistributedType.MULTI_GPU, 2, 16),
    ],
)
def test_configurations_start_as_many_processes_as_their_names_say(name, kind, machines, processes):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert (config.distributed_type, config.num_machines, config.num_processes) == (kind, machines, processes)


def test_a_machine_starts_its_share():
    options = "--machine_rank", "1", "--main_process_ip", "10.0.0.1"
    arguments = launcher_arguments(FOLDER / "machines_2_gpu_8.yaml", *options, "--main_process_port", "29500")
    prepare_multi_gpu_env(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "8", 1)
    assert arguments.rdzv_endpoint == "10.0.0.1:29500"


# Sharding


def test_fsdp2_shards_by_layers_that_the_model_has(fsdp_environment, make_config):
    assert fsdp_environment["FSDP_VERSION"] == "2"
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    module = SummedLoss(VanillaTransformerForConditionalGeneration(make_config()))
    plugin.set_auto_wrap_policy(module)  # raises where there is no such class
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    layers = [layer for stack in (module.model.model.encoder, module.model.model.decoder) for layer in stack.layers]
    assert wrapped == {type(layer) for layer in layers}
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward and not plugin.activation_checkpointing


def shard_and_compare(seed):
    """Shard a model as Accelerate does under the environment's configuration; its gradients are those of the whole."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(int(seed))
    config = VanillaTransformerConfig(vocab_size=50, d_model=16, d_ff=24, num_heads=2, dropout=0.0)
    module = SummedLoss(VanillaTransformerForConditionalGeneration(config))
    ids, labels = torch.randint(4, 50, (5, 7)), torch.randint(4, 50, (5, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    loss, _ = module(batch, 0.1)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator = SimpleNamespace(
        state=state, mixed_precision="no", is_main_process=True, device=torch.device("cpu"), torch_device_mesh=None
    )
    module = fsdp2_prepare_model(accelerator, module)
    sharded_loss, _ = module(batch, 0.1)
    sharded_loss.backward()
    torch.testing.assert_close(sharded_loss, loss)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
    torch.testing.assert_close(gradients, expected)
    print(sum(isinstance(part, FSDPModule) for part in module.modules()), "units")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_fsdp2_shards_every_layer_and_gives_the_same_gradients(fsdp_environment):
    call = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import test_launch"
    command = [sys.executable, "-c", f"{call}; test_launch.shard_and_compare(0)"]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(command, env={**environment(), **alone}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "13 units" in done.stdout  # 6 layers of either stack, and what is outside them


# Launching


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(**more):
    """Variables for a subprocess on the CPU that imports this package and finds this interpreter's commands."""
    paths = {"PYTHONPATH": str(Path(vanilla_transformer.__file__).parents[1]), "PATH": os.environ["PATH"]}
    paths["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), paths["PATH"]))
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a recipe and its corpus."""
    folder = tmp_path_factory.mktemp("toy")
    rows = [f"{i % 7} {i % 5} {i % 3}" for i in range(60)]
    (folder / "toy.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "rows.txt").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (folder / "reversed.txt").write_text("".join(f"{row[::-1]}\n" for row in rows), encoding="utf-8")
    text = ["--source", "rows.txt", "--target", "reversed.txt"]
    prepare = [sys.executable, ROOT / "train" / "prepare.py", "toy.yaml", *text, "--output", "corpus"]
    subprocess.run(prepare, cwd=folder, env=environment(), check=True, capture_output=True)
    return folder


def processes_of(run):
    """How many processes a finished run had."""
    assert json.loads((run / "report.json").read_text(encoding="utf-8"))["steps"] == 4
    return json.loads((run / "recipe.json").read_text(encoding="utf-8"))["processes"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("cpu_2_processes", 2), ("gpu_1", 1)])
def test_a_configuration_trains_on_the_cpu(toy, name, processes):
    run = toy / name
    options = ["--config_file", FOLDER / f"{name}.yaml"] + ["--main_process_port", "0"] * (processes > 1)
    script = [ROOT / "train" / "train.py", toy / "toy.yaml", "--corpus", toy / "corpus", "--output", run]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *script]
    done = subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert processes_of(run) == processes


@pytest.mark.slow
def test_the_slurm_script_trains_on_two_machines(toy, tmp_path):
    # Two launchers on this machine, started as srun would start one on each.
    commands = {
        "scontrol": '[ "$*" = "show hostnames here[1-2]" ] && printf "127.0.0.1\\nlocalhost\\n"',
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" & started+=($!); done; '
        'for one in "${started[@]}"; do wait "$one" || exit 1; done',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    given = environment(
        SLURM_JOB_NODELIST="here[1-2]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="1",
        SLURM_JOB_ID=str(free_port() - 10000),
    )
    given["PATH"] = os.pathsep.join((str(tmp_path), given["PATH"]))
    script = [FOLDER / "slurm.sh", toy / "toy.yaml", "--corpus", toy / "corpus", "--output", toy / "slurm"]
    done = subprocess.run(list(map(str, script)), cwd=ROOT, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert processes_of(toy / "slurm") == 2


def test_the_slurm_script_asks_for_what_its_configuration_starts():
    script = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script, flags=re.MULTILINE))
    config = load_config_from_file(str(FOLDER / "machines_2_gpu_8.yaml"))
    assert int(asked["nodes"]) == config.num_machines and asked["ntasks-per-node"] == "1"
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == config.num_processes
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)


# What is written about it


DOCUMENTS = sorted(path for kind in ("md", "yaml", "sh") for path in (ROOT / "train").rglob(f"*.{kind}"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_options_that_are_named_exist(path):
    text = re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for named in re.findall(r"\btrain/[\w/]+\.(?:py|yaml|sh|md)\b", text):
        assert (ROOT / named).is_file(), named
    for verb, options in re.findall(r"train/(prepare|train|average|score)\.py\b((?:.*\\\n)*.*)", text):
        known = {name for parameter in COMMANDS[verb].params for name in parameter.opts}
        assert set(re.findall(r"(?<= )--[a-z-]+", options)) <= known, (verb, options)
