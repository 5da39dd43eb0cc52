"""`razona push`: the model of a run on the hub, in one commit, with a card made from the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from razona.config import PushConfig
from razona.config.check import validate
from razona.errors import ConfigError, HubError, ModelError, RazonaError
from razona.models.lora import CONFIG as ADAPTER_CONFIG, WEIGHTS as ADAPTER_WEIGHTS
from razona.report.card import base_of_model, is_run, model_card, read_config, read_steps
from razona.run.console import Console

CARD = "README.md"
LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN to one from https://huggingface.co/settings/tokens."


def run(config: PushConfig, *, console: Console, dry_run: bool = False) -> dict[str, Any]:
    """Uploads the model that ``config`` names. ``dry_run`` prints the files and the card, and asks nobody.

    Raises ConfigError or ModelError where there is nothing to upload, HubError where the hub refuses it.
    """
    validate(config)
    check_name(config.repo)
    model, run_folder = find(config.folder, best=config.best)
    for note in what_to_know(model, run_folder, best=config.best):
        console.note(note)

    def card(repo: str) -> str:
        return model_card(model, run_folder, repo, best=config.best, license=config.license)

    files = files_of(model)
    if dry_run:
        sizes = {CARD: len(card(config.repo).encode()), **{n: p.stat().st_size for n, p in files.items()}}
        for name, size in sizes.items():
            console.print(f"{size:>14,}  {name}")
        console.print(f"{sum(sizes.values()):>14,}  bytes would go to {config.repo}, with this card:\n")
        console.print(card(config.repo))
        console.print("dry run: nothing was uploaded.")
        said = {"dry_run": True, "repo": config.repo, "bytes": sum(sizes.values()), "card": card(config.repo)}
        return said | {"model": str(model), "files": list(sizes)}
    done = upload(model, config.repo, card, private=config.private or None, console=console)
    return {"model": str(model), **done._asdict(), "commit": done.commit.commit_url}


def find(name: str, *, best: bool) -> tuple[Path, Path | None]:
    """The model's folder and that of its run. ``name`` is a run's folder, or a model's, in a run or not.

    Raises ModelError where there is no model, saying why.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(f"There is no folder {name}. Give that of a run: its output_dir.")
    if not is_run(folder):
        if best:
            raise ConfigError(f"--best with {name}, which is no run but a model. Give the run's folder.")
        if not _is_model(folder):
            raise ModelError(f"{name} is neither a run nor a model: it holds no config.json of either.")
        return folder, folder.parent if is_run(folder.parent) else None
    model = folder / ("best" if best else "model")
    if _is_model(model):
        return model, folder
    done, planned = len(read_steps(folder)), read_config(folder)["config"]["run"]["num_steps"]
    if best:
        raise ModelError(
            f"{name} kept no best step ({done} of {planned} steps are done): that takes held-out rows "
            "(--eval-data) and an evaluation. Leave out --best to upload the last model."
        )
    other = " Its best step so far can be uploaded with --best." if _is_model(folder / "best") else ""
    raise ModelError(
        f"{name} has no finished model: {done} of {planned} steps are done. Go on with the same command and "
        f"--run.resume; model/ is written at the end.{other}"
    )


def what_to_know(model: Path, run_folder: Path | None, *, best: bool) -> Iterator[str]:
    """Lines to print before an upload. Raises ModelError for a model that is older than the run's records."""
    if (model / ADAPTER_CONFIG).is_file() and base_of_model(model, {}) is None:
        yield (
            "the adapter's base is a model on this machine, not on the hub: nobody else can load it. "
            "`razona merge` makes one model of both, and that can be uploaded: razona push RUN/merged."
        )
    if run_folder is None or best or model.name != "model":
        return
    done, planned = len(read_steps(run_folder)), read_config(run_folder)["config"]["run"]["num_steps"]
    if _written(model) < _last_step_at(run_folder):
        raise ModelError(
            f"{model} is older than the last of the {done} steps in metrics.jsonl: the run went on and did "
            "not end. Go on with the same command and --run.resume, which writes the model at the end."
        )
    if done < planned:
        yield f"the run stopped after step {done} of {planned}; the card says so."


def _is_model(folder: Path) -> bool:
    weights = list(folder.glob("model*.safetensors")) and (folder / "config.json").is_file()
    return bool(weights) or all((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def _written(model: Path) -> float:
    return max(path.stat().st_mtime for path in model.glob("*.safetensors"))


def _last_step_at(run_folder: Path) -> float:
    """Time of day at which the last step was recorded."""
    path = run_folder / "timings.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return float(json.loads(lines[-1])["time"]) if lines else 0.0


def files_of(folder: Path) -> dict[str, Path]:
    """What is uploaded beside the card, by its name in the repository: every file that is not hidden."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: p for name, p in named.items() if name != CARD and not any(s[0] == "." for s in name.split("/"))
    }


def check_name(repo: str) -> None:
    """ConfigError for what cannot name a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"'{repo}' cannot name a repository: {error} Write OWNER/NAME.") from error


class Uploaded(NamedTuple):
    """Where it is: the repository's full name and URL, huggingface_hub's CommitInfo, and what was sent."""

    repo: str
    url: str
    commit: Any
    files: list[str]
    bytes: int


def open_repo(
    repo: str, *, private: bool | None, token: str | None = None, revision: str | None = None
) -> tuple[Any, str, set[str]]:
    """The hub's API, the full name of ``repo`` and the files that are there; the repository, and the branch,
    are made where they are not.

    ``private``: None leaves the choice to the hub. Raises HubError, which says what was refused and what to
    do; ConfigError for a public repository that ``private`` cannot hide.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    check_name(repo)
    api = HfApi(token=token, library_name="razona")
    with _refusals(api, repo, "nothing was uploaded"):
        user = api.whoami()["name"]
        repo = repo if "/" in repo else f"{user}/{repo}"
    there: set[str] = set()
    with _refusals(api, repo, "nothing was uploaded"):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:  # or no right to see it: then making it says so
            api.create_repo(repo, private=private, exist_ok=True)
        else:
            if private and not info.private:
                raise ConfigError(
                    f"{repo} is on the hub already, and public: what is uploaded to it can be seen by all. "
                    f"Make it private at {api.endpoint}/{repo}/settings, or give another name. Nothing was "
                    "uploaded."
                )
            there = {file.rfilename for file in info.siblings or ()}
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
    return api, repo, there if revision is None else set()


def upload(
    folder: Path,
    repo: str,
    card: Callable[[str], str],
    *,
    private: bool | None,
    console: Console,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Upload of the model and its card, with razona",
) -> Uploaded:
    """Every file of ``folder`` and the card, made for the repository's full name, as one commit: all of it
    is there afterwards, or nothing. The rest as `open_repo`.
    """
    from huggingface_hub import CommitOperationAdd

    api, repo, there = open_repo(repo, private=private, token=token, revision=revision)
    files = files_of(folder)
    text = card(repo).encode()
    operations = [CommitOperationAdd(CARD, text)]
    operations += [CommitOperationAdd(name, path) for name, path in files.items()]
    with _refusals(api, repo, f"{repo} is there, and nothing was committed to it"):
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    if left := sorted(there - {CARD, ".gitattributes", *files}):
        console.note(
            f"files of an earlier upload are still in {repo}: {', '.join(left)}. Delete those that do not "
            "belong to this model: weights of another kind would be loaded in its place."
        )
    size = len(text) + sum(path.stat().st_size for path in files.values())
    url = f"{api.endpoint}/{repo}"
    console.print(f"{len(operations)} files, {size:,} bytes, are in {url}")
    return Uploaded(repo, url, commit, [CARD, *files], size)


@contextmanager
def _refusals(api: Any, repo: str, so_far: str) -> Iterator[None]:
    """Every failure of the hub as a HubError: what was asked, what it said, what stands, what to do."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except RazonaError:
        raise
    except LocalTokenNotFoundError as error:
        raise HubError(f"There is no token for {api.endpoint}, so {so_far}. {LOG_IN}") from error
    except OfflineModeIsEnabled as error:
        raise HubError(
            f"The hub is switched off (HF_HUB_OFFLINE is set), so {so_far}. Unset it for this command; "
            "--dry-run shows what would be uploaded, without the hub."
        ) from error
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # of this library's threads too
        answer: Any = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        if not isinstance(answer, HfHubHTTPError):
            raise HubError(
                f"{api.endpoint} gave no usable answer ({type(error).__name__}: {_first_line(error)}), so "
                f"{so_far}. Check the network and HF_ENDPOINT, and give the command again."
            ) from error
        said = answer.server_message or _first_line(answer)
        if isinstance(error, ValueError) and error is not answer:  # what is wrong with the card, in lines
            said = "; ".join(line.strip("- .") for line in str(error).splitlines())
        status = answer.response.status_code
        raise HubError(
            f"{api.endpoint} refused {repo} with {status} ({said.rstrip('.')}), so {so_far}. "
            f"{_cure(status, repo)}"
        ) from error


def _cure(status: int, repo: str) -> str:
    if status == 400:
        return "Mend what it names; a license is spelled as the hub does: --license apache-2.0."
    if status == 401:
        return f"The token is missing, wrong or has run out. {LOG_IN}"
    if status == 403:
        return (
            f"The token may not write to '{repo.split('/')[0]}': give a token with the role write there, or "
            "a repository of your own."
        )
    return "Give the command again: what is there already is not sent twice."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
