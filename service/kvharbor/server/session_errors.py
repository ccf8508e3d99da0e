"""Refusals about who calls: sessions, their processes, and administrators. Part of the tree that errors.py draws."""

from kvharbor.server.errors import ServerError


class SessionRequired(ServerError):
    """The call needs a session."""

    reason = "SESSION_REQUIRED"
    remedy = 'open a side socket and send its session token as metadata "kvharbor-session"'

    def __init__(self) -> None:
        super().__init__(f"this call needs a session: {self.remedy}")

    def metadata(self) -> dict[str, str]:
        return {"remedy": self.remedy}


class SessionUnknown(ServerError):
    """The token is of no live session. `cause` is why the session ended; empty where that is not known."""

    reason = "SESSION_UNKNOWN"

    def __init__(self, cause: str = "") -> None:
        self.cause = cause
        ended = f"the session has ended ({cause})" if cause else "the session token is unknown or its session has ended"
        super().__init__(f"{ended}: connect again")

    def metadata(self) -> dict[str, str]:
        return {"cause": self.cause} if self.cause else {}


class AdminRequired(ServerError):
    """The call is for administrators."""

    reason = "ADMIN_REQUIRED"
    remedy = "call as uid 0, as the user of the service, or as one of the setting admin_uids"

    def __init__(self, uid: int | None) -> None:
        self.uid = uid
        super().__init__(f"uid {uid} is no administrator: {self.remedy}")

    def metadata(self) -> dict[str, str]:
        return {"uid": str(self.uid), "remedy": self.remedy}


class SessionNotFound(ServerError):
    """No session of that id lives, or waits for the end of its processes."""

    reason = "SESSION_NOT_FOUND"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(
            f"no session {session_id!r} is here, or nothing of it is left any more: see `kvharbor sessions`"
        )

    def metadata(self) -> dict[str, str]:
        return {"sessionId": self.session_id}


class MpsClientRefused(ServerError):
    """The process works on the device through a CUDA MPS server, which outlives it."""

    reason = "MPS_CLIENT_REFUSED"
    remedy = "run the worker without MPS, or accept the risk with the service's setting allow_mps"

    def __init__(self, device: str) -> None:
        self.device = device
        super().__init__(
            f"the process uses device {device} through CUDA MPS, so that its death would not prove that its kernels "
            f"have stopped: {self.remedy}"
        )

    def metadata(self) -> dict[str, str]:
        return {"device": self.device, "remedy": self.remedy}


class ResumeRequired(ServerError):
    """The process before this one knew what the session holds; this one has to be told."""

    reason = "RESUME_REQUIRED"
    remedy = "say hello with `resume` on a new side socket, then call Resume for the pool"

    def __init__(self, pool_id: str) -> None:
        self.pool_id = pool_id
        super().__init__(f"the service's process was replaced and pool {pool_id!r} is not resumed: {self.remedy}")

    def metadata(self) -> dict[str, str]:
        return {"poolId": self.pool_id, "remedy": self.remedy}


class PeerUnproven(ServerError):
    """The kernel does not prove which process connects, so that its end could never be known."""

    reason = "PEER_UNPROVEN"

    def __init__(self, pid: int, *, remedy: str) -> None:
        self.pid = pid
        self.remedy = remedy
        super().__init__(f"the kernel does not prove which process connects (pid {pid}): {remedy}")

    def metadata(self) -> dict[str, str]:
        return {"pid": str(self.pid), "remedy": self.remedy}


class RankTaken(ServerError):
    """Two members of a session cannot have one rank."""

    reason = "RANK_TAKEN"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} of the session is taken: join with a rank of its own")

    def metadata(self) -> dict[str, str]:
        return {"rank": str(self.rank)}
