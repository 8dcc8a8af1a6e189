"""From a model's folder and its scores to a complete Hub repository, and to the Hub."""

import json
import shutil
from pathlib import Path

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

from .checkpoint import STATE, write_folder

# What a repository holds beside its model card: enough to load the model anywhere, and nothing else.
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "configuration_vanilla_transformer.py",
    "generation_vanilla_transformer.py",
    "modeling_vanilla_transformer.py",
    "pipeline_vanilla_transformer.py",
)

USAGE = """
## Use

With the package `vanilla_transformer` installed:

```python
import vanilla_transformer
from transformers import pipeline

translate = pipeline("translation", model="path/to/{name}")  # this repository's folder, or its name on the Hub
translate({example!r})
```

Without it, the code in this repository serves: read it, then pass `trust_remote_code=True` to `pipeline`.
"""


def build_repository(
    model: str | Path,
    output: str | Path,
    card: str,
    metadata: dict,
    results: list[dict],
    example: str,
    overwrite: bool = False,
) -> Path:
    """Lay a model out as its Hub repository.

    Args:
        model: a folder that `from_pretrained` loads, with its tokenizer.
        output: the folder to make; its name is the model's.
        card: the model card's own text, in Markdown: what the model is, how it was trained, how to repeat its scores.
        metadata: the card's fields by the Hub's names: `language`, `license`, `datasets`, …
        results: for each test set, `dataset_name`, `dataset_type`, `dataset_split` and `metrics`, figures by name.
        example: a sentence that the card translates.
        overwrite: replace a folder of that name.

    Returns:
        `output`.

    Raises:
        FileNotFoundError: the model's folder lacks one of a repository's files.
        FileExistsError: the output exists, and `overwrite` is not set.
    """
    model, output = Path(model), Path(output)
    missing = [name for name in FILES if not (model / name).exists()]
    if missing:
        raise FileNotFoundError(f"{model} lacks {', '.join(missing)}: save model and tokenizer there first")
    evaluations = [
        EvalResult(
            task_type="translation",
            dataset_name=result["dataset_name"],
            dataset_type=result["dataset_type"],
            dataset_split=result["dataset_split"],
            metric_type=metric,
            metric_value=round(value, 2),
        )
        for result in results
        for metric, value in result["metrics"].items()
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="translation",
        model_name=output.name,
        eval_results=evaluations,
        **metadata,
    )
    usage = USAGE.format(name=output.name, example=example)
    text = f"---\n{data.to_yaml()}\n---\n\n{card.strip()}\n{usage}"

    def write(folder):
        for name in FILES:
            shutil.copyfile(model / name, folder / name)
        _make_portable(folder / "tokenizer_config.json")
        ModelCard(text).save(folder / "README.md")

    write_folder(output, write, overwrite)
    return output


def _make_portable(path):
    """Name the tokenizer's class as every version of transformers knows it, and drop traces of where it lay."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for trace in ("is_local", "local_files_only", "name_or_path"):
        settings.pop(trace, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def publish(folder: str | Path, repo_id: str, private: bool = False, token: str | None = None) -> str:
    """Upload a folder to the Hub.

    Args:
        folder: what `build_repository` made, or any folder that `from_pretrained` loads.
        repo_id: "user/name".
        private: make the repository private if it is new.
        token: the Hub's access token; `None` for the one that `hf auth login` stored.

    Returns:
        The address of the commit.

    Raises:
        FileNotFoundError: the folder lacks one of a repository's files.
    """
    missing = [name for name in FILES if not (Path(folder) / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: build the repository first")
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    unfinished = [f"{STATE}/*", "checkpoint-*/*"]  # what resuming needs, of our training and of Trainer's
    return api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=unfinished).commit_url
