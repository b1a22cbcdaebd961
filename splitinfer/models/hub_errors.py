"""Says in one clause why the hub, or what answers in its place, gave nothing.

huggingface_hub raises some twenty kinds of errors with texts of several lines, often one as the cause of another. On an
answer that is not the hub's it raises whatever its parsing of JSON ends with.
"""

from collections.abc import Iterator


def why_not(repo: str, error: Exception) -> str:
    """The reason, as the second half of a sentence: "the hub cannot be reached (...)"."""
    from huggingface_hub import constants, errors

    elsewhere = (
        "what answers at {endpoint} is not the hub ({line}): log in to this network in a browser, or check HF_ENDPOINT"
    )
    login = "log in with `hf auth login`"
    kinds: dict[type[BaseException], str] = {  # the first that is among the causes
        errors.GatedRepoError: f"it is gated: accept its terms at {{endpoint}}/{{repo}}, then {login}",
        errors.RepositoryNotFoundError: f"the hub has no such model, or it is private: check the name, or {login}",
        errors.HFValidationError: "the hub allows no such name: give owner/name",
        errors.HfHubHTTPError: "{status}",
        errors.OfflineModeIsEnabled: "the hub cannot be reached (HF_HUB_OFFLINE is set)",
        errors.FileMetadataError: elsewhere,
        errors.HTTPError: "the hub cannot be reached ({line})",
        ConnectionError: "the hub cannot be reached ({line})",
        TimeoutError: "the hub cannot be reached ({line})",
        errors.LocalEntryNotFoundError: "the hub cannot be reached",
        errors.SafetensorsParsingError: "a file of weights at the hub cannot be read ({line})",
        OSError: "its files cannot be stored on this machine ({line})",
        BaseException: elsewhere,
    }
    chain = list(_causes(error))
    found, text = next((one, text) for kind, text in kinds.items() for one in chain if isinstance(one, kind))
    status = _of_status(getattr(getattr(found, "response", None), "status_code", None), login)
    return text.format(repo=repo, endpoint=constants.ENDPOINT, line=_first_line(found), status=status)


def _of_status(status: int | None, login: str) -> str:
    match status:
        case 401 | 403:
            return f"the hub refuses your login ({status}): {login} again"
        case 404:
            return "the hub does not have that file (404)"
        case 429:
            return f"the hub gets too many requests from you (429): wait a few minutes, or {login}"
    return f"the hub fails ({status}): try again later"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen = set[int]()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        yield now
        seen.add(id(now))
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
