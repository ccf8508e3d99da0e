"""An engine without an instance is called as those of its name and version are that are told together. [U3]"""

from kvharbor.pool.engines import MOST, Engine, Engines


def test_an_engine_may_be_what_others_have_just_been_told_as() -> None:
    """[U2] No figure is lost by it: it goes on with theirs."""
    engines = Engines(8)
    for instance in range(MOST):
        number = engines.begin(Engine("n", "1", str(instance)), ())
        engines.granted(number, 10, ())
    kind = Engine("n", "1")
    engines.granted(engines.begin(kind, ()), 10, ())
    told = engines.stats(4, {}, engines.committed(bytearray(8)))
    assert sum(one.prompt_token_count for one in told) == 10 * (MOST + 1)
    assert next(one.prompt_token_count for one in told if one.engine == kind) == 30
    assert len(told) == MOST - 1
