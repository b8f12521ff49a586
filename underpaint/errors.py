"""Everything that can go wrong for a caller, as one tree. Each carries one sentence that says what to do.

    UnderpaintError
    |-- BadRequest              the request is wrong; ``param`` names the parameter
    |   |-- BadParameter        a value out of range, or two values that do not go together
    |   |-- BadSize             a size that the model cannot paint
    |   |-- BadImage            a reference that is not a readable, usable picture
    |   |-- PromptTooLong
    |   `-- BudgetTooSmall      the request can never fit the K/V byte budget
    |-- BadConfig               an engine option that cannot be honoured
    |-- CheckpointError         a model directory that is incomplete, damaged, or of another kind
    |-- OutOfPages              the K/V pool is full of pages in use
    |-- OutOfMemory             the device ran out of memory; nothing stays taken
    |-- MissingBranch           a guidance branch was not handed over
    |-- DeadlinePassed          the request was not done in the time it was given
    |-- EngineFailure           a pass broke for a reason that is not the caller's
    `-- Cancelled               the caller cancelled the painting

``code`` and ``status`` (HTTP) are for servers. Broken invariants of our own are ``assert``.
"""


class UnderpaintError(Exception):
    """The root of the tree."""

    code = "internal_error"
    status = 500


class BadRequest(UnderpaintError):
    code = "bad_request"
    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadParameter(BadRequest):
    code = "bad_parameter"


class BadSize(BadRequest):
    code = "bad_size"


class BadImage(BadRequest):
    code = "bad_image"


class PromptTooLong(BadRequest):
    code = "prompt_too_long"

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens, the limit is {limit}; shorten it", param="prompt")
        self.num_tokens = num_tokens
        self.limit = limit


class BudgetTooSmall(BadRequest):
    code = "budget_too_small"
    status = 413

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"this request needs {needed_bytes} bytes of K/V cache and the budget is {budget_bytes}; "
            f"set kv_cache_bytes to at least {needed_bytes}, use fewer or smaller references, or a smaller kv_codec"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class BadConfig(UnderpaintError):
    code = "bad_config"


class CheckpointError(UnderpaintError):
    code = "bad_checkpoint"


class OutOfPages(UnderpaintError):
    code = "out_of_pages"
    status = 503


class OutOfMemory(UnderpaintError):
    code = "out_of_memory"
    status = 503


class MissingBranch(UnderpaintError):
    code = "missing_branch"

    def __init__(self, branch: str) -> None:
        super().__init__(f"the {branch} branch is missing, and the picture cannot be guided without it")


class DeadlinePassed(UnderpaintError):
    code = "deadline_passed"
    status = 504


class EngineFailure(UnderpaintError):
    code = "engine_failure"


class Cancelled(UnderpaintError):
    code = "cancelled"
    status = 499


PASS_FAILURES = Exception
"""What may break in a pass through a model: anything. torch's failures are RuntimeErrors, but Triton's are of no kind
but their own, and compiling a kernel meets full disks and missing compilers. The engines end the request that broke
with it, so that whoever happened to turn them is not hit instead, and others go on."""
