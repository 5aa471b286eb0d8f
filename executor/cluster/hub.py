"""Asks the Hugging Face Hub, or its local cache, for a model before the engine starts."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

SECONDS = 5.0  # for the Hub to answer

_CONFIGS = ("config.json", "params.json", "tokenizer_config.json", "tokenizer.json")


def look(source: str, revision: str | None, token: str | bool | None, before: str) -> list[str] | Path | None:
    """Return what there is of a Hub id.

    Args:
        source: the Hub id, `NAME` or `ORGANIZATION/NAME`.
        revision: a branch, tag or commit; the Hub's default if None.
        token: a Hub token; the environment's if None.
        before: what messages say first: that there is no folder of that name.

    Returns:
        The names of the files on the Hub; the folder in the local cache if the Hub cannot be asked; None if the Hub does not
        answer the question.

    Raises:
        ValueError: there is no such model, or this machine may not read it.
        ConnectionError: the Hub cannot be reached, and the local cache has no such model.
    """
    from huggingface_hub import HfApi, constants, get_hf_file_metadata
    from huggingface_hub import errors as hub_errors

    where = constants.ENDPOINT.partition("://")[2]
    if constants.is_offline_mode():
        cached = _cached(source, revision)
        if cached is None:
            raise ValueError(f"{before}HF_HUB_OFFLINE is set and {_not_cached(source, revision)}")
        return cached
    try:
        info = HfApi().model_info(source, revision=revision, timeout=SECONDS, token=token)
        if info.gated:  # everybody may see what is in it
            url = f"{constants.ENDPOINT}/{source}/resolve/{quote(revision or 'main', safe='')}/config.json"
            get_hf_file_metadata(url, timeout=SECONDS, token=token)
        return [one.rfilename for one in info.siblings or ()]
    except hub_errors.GatedRepoError:
        raise ValueError(
            f"{before}{source} on {where} is gated: ask for access on its page, and set HF_TOKEN to a token of that account"
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise ValueError(f"{before}{source} on {where} has no revision {revision!r}") from None
    except hub_errors.RepositoryNotFoundError:
        raise ValueError(
            f"{before}{where} has no model {source}, or a private one: then set HF_TOKEN to a token that may read it"
        ) from None
    except (hub_errors.EntryNotFoundError, hub_errors.HfHubHTTPError):
        return None  # the Hub is there, and has its own troubles or another answer to come
    except hub_errors.HFValidationError as error:
        raise ValueError(f"{before}it is no id of the Hugging Face Hub either: {error}") from None
    except Exception as error:  # of the HTTP library that huggingface_hub uses
        cached = _cached(source, revision)
        if cached is None:
            raise ConnectionError(
                f"{before}{where} cannot be reached ({type(error).__name__}: {error}); {_not_cached(source, revision)}"
            ) from None
        return cached


def _cached(source: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the local cache; None if its configuration is not there."""
    from huggingface_hub import try_to_load_from_cache

    for name in _CONFIGS:
        found = try_to_load_from_cache(source, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _not_cached(source: str, revision: str | None) -> str:
    from huggingface_hub import constants

    named = f"{source} of revision {revision}" if revision else source
    return f"the local cache ({constants.HF_HUB_CACHE}) has no model {named}"
