"""What a caller may know of an error."""

from __future__ import annotations

import logging
import uuid

from jserve.errors import JserveError, RequestError

__all__ = ["public"]

log = logging.getLogger(__name__)


def public(error: Exception) -> JserveError:
    """A RequestError is written for the caller and told as it is. Anything else goes to the log under an id, and the
    caller gets the id only."""
    if isinstance(error, RequestError):
        return error
    incident = uuid.uuid4().hex[:12]
    log.error("internal error, id %s", incident, exc_info=error)
    return JserveError(f"internal error, id {incident}; the server's log has the cause under this id")
