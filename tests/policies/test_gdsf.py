"""GreedyDual-Size-Frequency with the time that recomputing takes."""

from manthan.policies import SessionView
from manthan.policies.gdsf import GDSF, GDSFOptions

TOKEN_NBYTES = 100


def view(session_id: str, tokens: int, uses: int = 1) -> SessionView:
    return SessionView(session_id, tokens=tokens, nbytes=tokens * TOKEN_NBYTES, uses=uses)


def order(*views: SessionView, attention_tokens: float = 50_000) -> list[str]:
    policy = GDSF(GDSFOptions(attention_tokens=attention_tokens))
    for one in views:
        policy.used(one)
    return list(policy.victims())


def test_long_chains_are_kept_for_they_save_more_per_byte() -> None:
    assert order(view("long", 32_000), view("short", 500)) == ["short", "long"]


def test_who_is_not_used_is_overtaken_by_newcomers() -> None:
    policy = GDSF()
    policy.used(view("often", 1000, uses=5))
    gone = []
    for number in range(9):
        policy.used(view(f"new{number}", 1000))
        gone.append(next(policy.victims()))
        policy.evicted(gone[-1])
    assert gone == ["new0", "new1", "new2", "new3", "often", "new4", "new5", "new6", "new7"]
