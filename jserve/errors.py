"""Every error that jserve raises on purpose, with its code, gRPC status and exit status.

    JserveError                     JS-INT-01  INTERNAL             exit 1
    ├── RequestError                           (fails one request, before or while it runs)
    │   ├── InvalidRequest          JS-REQ-01  INVALID_ARGUMENT
    │   │   ├── PromptTooLong       JS-REQ-02
    │   │   └── TemplateError       JS-REQ-03
    │   ├── NotFound                JS-REQ-04  NOT_FOUND
    │   ├── DuplicateRequest        JS-REQ-05  ALREADY_EXISTS
    │   ├── Unsupported             JS-REQ-06  UNIMPLEMENTED
    │   ├── MessageTooLarge         JS-LIM-01  RESOURCE_EXHAUSTED
    │   ├── QueueFull               JS-LIM-02  RESOURCE_EXHAUSTED   carries retry_after_s
    │   ├── SlowReader              JS-LIM-03  RESOURCE_EXHAUSTED
    │   ├── DeadlineExceeded        JS-REQ-07  DEADLINE_EXCEEDED
    │   ├── Cancelled               JS-REQ-08  CANCELLED
    │   ├── Draining                JS-SRV-01  UNAVAILABLE
    │   └── EngineFailed            JS-SRV-02  INTERNAL
    ├── Unreachable                 JS-NET-01  UNAVAILABLE          exit 1 (raised by clients)
    └── StartError                             (the program cannot start)
        ├── ConfigError             JS-CFG-01                       exit 3
        │   └── MeshError           JS-CFG-02                       exit 3
        ├── CheckpointError         JS-CKP-01                       exit 4
        │   ├── SourceError         JS-CKP-02                       exit 4
        │   └── UnsupportedModel    JS-CKP-03                       exit 4
        └── DeviceError             JS-DEV-01                       exit 5
            └── OutOfMemory         JS-MEM-01                       exit 5

A message says what was given, what is allowed and what to do. Usage errors of the command line exit 2.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "Cancelled",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "Draining",
    "DuplicateRequest",
    "EngineFailed",
    "InvalidRequest",
    "JserveError",
    "MeshError",
    "MessageTooLarge",
    "NotFound",
    "OutOfMemory",
    "PromptTooLong",
    "QueueFull",
    "RequestError",
    "SlowReader",
    "SourceError",
    "StartError",
    "TemplateError",
    "Unreachable",
    "Unsupported",
    "UnsupportedModel",
]


class JserveError(Exception):
    """Root of the tree. ``code`` is stable and documented; ``grpc_status`` is a ``grpc.StatusCode`` name."""

    code: ClassVar[str] = "JS-INT-01"
    grpc_status: ClassVar[str] = "INTERNAL"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class RequestError(JserveError):
    """Fails one request and leaves everything else as it was."""


class InvalidRequest(RequestError):
    code = "JS-REQ-01"
    grpc_status = "INVALID_ARGUMENT"


class PromptTooLong(InvalidRequest):
    code = "JS-REQ-02"


class TemplateError(InvalidRequest):
    """The chat template refused the messages, ran too long, or there is none."""

    code = "JS-REQ-03"


class NotFound(RequestError):
    code = "JS-REQ-04"
    grpc_status = "NOT_FOUND"


class DuplicateRequest(RequestError):
    code = "JS-REQ-05"
    grpc_status = "ALREADY_EXISTS"


class Unsupported(RequestError):
    """A call that exists in the protocol and that this server or model cannot serve."""

    code = "JS-REQ-06"
    grpc_status = "UNIMPLEMENTED"


class DeadlineExceeded(RequestError):
    code = "JS-REQ-07"
    grpc_status = "DEADLINE_EXCEEDED"


class Cancelled(RequestError):
    code = "JS-REQ-08"
    grpc_status = "CANCELLED"


class MessageTooLarge(RequestError):
    code = "JS-LIM-01"
    grpc_status = "RESOURCE_EXHAUSTED"


class QueueFull(RequestError):
    """The waiting queue is full; try again after ``retry_after_s`` seconds."""

    code = "JS-LIM-02"
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class SlowReader(RequestError):
    """The client did not read its own stream and its outbox reached its bound."""

    code = "JS-LIM-03"
    grpc_status = "RESOURCE_EXHAUSTED"


class Draining(RequestError):
    """The server is not ready, shutting down, or cut this stream when its grace ended."""

    code = "JS-SRV-01"
    grpc_status = "UNAVAILABLE"


class EngineFailed(RequestError):
    """The engine failed under this request; the cause is in the server's log, under an id."""

    code = "JS-SRV-02"


class Unreachable(JserveError):
    """A client found no server at its address, or lost the connection to it."""

    code = "JS-NET-01"
    grpc_status = "UNAVAILABLE"


class StartError(JserveError):
    """The program cannot start. ``fix`` is a line to paste or a thing to do."""

    code = "JS-CFG-00"


class ConfigError(StartError):
    code = "JS-CFG-01"
    exit_status = 3


class MeshError(ConfigError):
    """A mesh that does not divide the model or that has more devices than there are."""

    code = "JS-CFG-02"


class CheckpointError(StartError):
    code = "JS-CKP-01"
    exit_status = 4


class SourceError(CheckpointError):
    """The files of a checkpoint cannot be found, fetched or trusted."""

    code = "JS-CKP-02"


class UnsupportedModel(CheckpointError):
    """The files are whole, and name an architecture, tokenizer or option that is not built."""

    code = "JS-CKP-03"


class DeviceError(StartError):
    code = "JS-DEV-01"
    exit_status = 5


class OutOfMemory(DeviceError):
    code = "JS-MEM-01"
