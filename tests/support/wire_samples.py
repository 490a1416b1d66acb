"""One fixed example of every message, for the golden vectors; and encoding without knowing the kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frogzmq.types import Digest, GroupId, Role
from frogzmq.wire import frames, messages, ranks
from frogzmq.wire.messages import PROTOCOL, ChunkHeader

VECTORS = Path(__file__).resolve().parents[1] / "wire" / "vectors"

GID, DIGEST = "00112233445566778899aabbccddeeff", "0123456789abcdef" * 4
WHO = messages.Identity(
    peer="0123456789abcdef",
    instance="i-1",
    name="node-a",
    endpoints=["tcp://10.0.0.1:7000", "tcp://[fd00::1]:7000"],
    local_endpoint="tcp://127.0.0.1:7000",
    pub_endpoints=["tcp://10.0.0.1:7001"],
    key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    netns="boot:4026531840",
    python="3.11.7",
    version="0.1.0",
)
DESCRIPTOR = b'[1,1,"float32",[100,2560],-1]'
PAYLOAD = bytes(range(32))
CHUNK = ChunkHeader(
    gid=GroupId(bytes.fromhex(GID)),
    seq=7,
    role=Role.RESULT,
    part=0,
    index=3,
    size=len(PAYLOAD),
    digest=Digest(bytes.fromhex(DIGEST)),
    descriptor=bytes(range(8)),
    done=6,
)

CONTROLS: tuple[messages.Message, ...] = (
    messages.Hello(who=WHO),
    messages.Welcome(who=WHO),
    messages.Refuse(code="DuplicateIdentity", text="two peers are called node-a"),
    messages.Ping(nonce=5, sent=12.25),
    messages.Pong(nonce=5, sent=12.25),
    messages.Bye(reason="stopped by the operator"),
    messages.GroupReady(gid=GID, ranks=[0, 1], members=DIGEST, options="mode=auto", settled=True),
    messages.GroupFailed(gid=GID, seq=7, code="RankLost", text="rank 3 on node-b died"),
    messages.RankGone(gid=GID, rank=3, last_seq=-1, clean=False, reason="killed"),
    messages.OpDescriptor(gid=GID, seq=7, rank=3, descriptor=DESCRIPTOR.decode()),
    messages.Manifest(gid=GID, seq=7, part=1, root=DIGEST, observed=[(0, 0.0), (1, 0.125)]),
    messages.Want(gid=GID, seq=7, items=[(0, 1, 2), (1, 0, 9)]),
    messages.Have(peer=WHO.peer, gid=GID, seq=7, parts=[0, 1], results=True),
    messages.OpDone(gid=GID, upto=8),
    messages.Credit(cost=64),
    messages.Links(peer=WHO.peer, rows=[("fedcba9876543210", 0.001, 1e9, 2.5e8)]),
    messages.MailOffer(gid=GID, src=1, dst=3, n=7, tag=5, size=1 << 26, dtype="float32"),
    messages.MailWant(gid=GID, src=1, dst=3, n=7, chunks=[0, 63]),
    messages.MailSeen(gid=GID, src=1, dst=3, known=8, numbers=[6, 7], answers=9),
    messages.MailAsk(gid=GID, src=1, dst=3, upto=9, numbers=[6, 7]),
    messages.MailLost(gid=GID, src=1, dst=3, n=7, text="rank 1 left before it gave the bytes"),
    messages.OpReceipt(
        gid=GID, seq=7, op=DIGEST, given=[(1, DIGEST)], held="", result=DIGEST, odd=[(3, DIGEST)]
    ),
)
RANKS: tuple[ranks.Datagram, ...] = (
    ranks.Hello(protocol=PROTOCOL, pid=4711, version="0.1.0", torch="2.13.0", python="3.11.7"),
    ranks.Join(
        gid=GID,
        job="job",
        name="default_pg",
        rank=1,
        size=2,
        timeout_s=1800.0,
        options=messages.GroupOptions(),
        members=[messages.Member(rank=1, pid=4711, host="node-a", who=WHO)],
        handle=9,
    ),
    ranks.Lease(1, 1 << 20),
    ranks.Post(9, 7, ranks.INLINE, 0, 0, len(PAYLOAD), len(PAYLOAD), DESCRIPTOR, PAYLOAD),
    ranks.Ready(9, 7, 4096),
    ranks.Consumed(9, 7),
    ranks.Leave(handle=9, clean=True, reason=""),
    ranks.Explain(9, 7),
    ranks.Bye(clean=False, reason="SystemExit"),
    ranks.Peek(),
    ranks.Stop(),
    ranks.Unlease(1, 1 << 30),
    ranks.Got(9, 7, bytes(range(32))),
    ranks.Welcome(protocol=PROTOCOL, who=WHO, pid=42, arena=["/dev/shm/frogzmq/arena.0"], ephemeral=True),
    ranks.Joined(handle=9),
    ranks.Leased(1, 0, 1 << 21, 1 << 20),
    ranks.Result(9, 7, ranks.FINAL, 1, 1 << 21, 1024000, 1024000),
    ranks.Failed(handle=9, seq=7, code="RankLost", text="rank 3 on node-b died"),
    ranks.Freed(9, 7),
    ranks.Explained(handle=9, seq=7, text="waits for rank 3 on node-b"),
    ranks.Peeked(snapshot={"peer": "0123456789abcdef", "groups": [{"seq": 7, "waits": None}], "load": 0.5}),
    ranks.Error(code="StoreFull", text="no room for 1048576 bytes", req=1),
    ranks.Verified(9, 7),
    ranks.Note(handle=9, text="node-b is slow: 120 ms"),
    ranks.Mail(9, 7, ranks.INLINE, 3, 5, len(PAYLOAD), "float32", PAYLOAD),
    ranks.MailBytes(9, 8, 0, 3, 1, 1 << 21, 4096),
    ranks.Receive(9, 4, 1, 5, 1 << 26, "bfloat16"),
    ranks.MailTaken(9, 4),
    ranks.MailRead(9, 48),
    ranks.Arrived(9, 4, ranks.FINAL, 1, 1, 1 << 21, 1024000, 1024000),
    ranks.MailAsked(9, 8, 3),
    ranks.MailDone(9, 8, 3),
    ranks.MailFailed(handle=9, n=4, dst=-1, code="RankLost", text="rank 1 has left the group"),
)
_ENCODERS: dict[type, Any] = {
    ranks.Lease: ranks.encode_lease,
    ranks.Post: ranks.encode_post,
    ranks.Ready: ranks.encode_ready,
    ranks.Consumed: ranks.encode_consumed,
    ranks.Explain: ranks.encode_explain,
    ranks.Unlease: ranks.encode_unlease,
    ranks.Leased: ranks.encode_leased,
    ranks.Result: ranks.encode_result,
    ranks.Freed: ranks.encode_freed,
    ranks.Mail: ranks.encode_mail,
    ranks.MailBytes: ranks.encode_mail_bytes,
    ranks.Receive: ranks.encode_receive,
    ranks.MailTaken: ranks.encode_mail_taken,
    ranks.MailRead: ranks.encode_mail_read,
    ranks.Arrived: ranks.encode_arrived,
    ranks.MailAsked: ranks.encode_mail_asked,
    ranks.MailDone: ranks.encode_mail_done,
    ranks.Got: ranks.encode_got,
    ranks.Verified: ranks.encode_verified,
}


def encode_datagrams(message: ranks.Datagram) -> list[bytes]:
    """Encode any message of the local socket."""
    encoder = _ENCODERS.get(type(message))
    return [encoder(*message)] if encoder else ranks.encode_json(message)  # type: ignore[arg-type]


def vectors() -> dict[str, bytes]:
    """Return file name -> bytes of every golden vector; the chunk's frames stand one behind the other."""
    found = {f"peer-{type(message).__name__}.bin": frames.encode(message) for message in CONTROLS}
    found["peer-chunk.bin"] = frames.encode_chunk(CHUNK) + PAYLOAD
    for message in RANKS:
        found[f"rank-{type(message).__name__}.bin"] = b"".join(encode_datagrams(message))
    return found
