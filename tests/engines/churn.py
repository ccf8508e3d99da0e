"""Random events over engines on one pool, and what has to hold at the end of them."""

import random
from typing import Any

from engines.fake_owner import FakeOwner
from engines.scheduler_configs import vllm_config
from engines.scheduler_world import Engine, Mutation, World, expected_answer, prompt

BLOCK_COUNT = 40
EVENT_COUNT = 1500
DRAIN_LOOPS = 3000
MOST_REQUESTS = 8


class Events:
    """What happens to the `engines` that are put in: requests come, are aborted, and are answered step by step."""

    def __init__(self, seed: int, family_count: int = 4) -> None:
        self.family_count = family_count
        self.dice = random.Random(seed)
        self.world = World()
        self.engines: list[Engine] = []
        self.asked: dict[str, tuple[Engine, list[int], int, str, int]] = {}
        self.weights = 0
        self.aborted: set[str] = set()
        self.event_count = 0

    def happen(self, event_count: int, *, salts: int = 1, resets: bool = False) -> None:
        """Lets so many events happen."""
        for _ in range(event_count):
            self._event(self.dice.choice(self.engines), salts=salts, resets=resets)
            self.event_count += 1

    def ask(self, name: str, engine: Engine, tokens: list[int], answer_count: int, salt: str = "", **more: Any) -> None:
        """A request comes."""
        self.asked[name] = (engine, tokens, answer_count, salt, engine.weights)
        engine.add(name, tokens, answer_count, salt=salt, **more)

    def check_answers(self) -> None:
        """Each answer is that of an engine without a cache."""
        for name, (engine, tokens, count, salt, weights) in self.asked.items():
            if name not in self.aborted:
                assert engine.answers[name] == expected_answer(self.world, salt, tokens, count, weights), name

    def _event(self, engine: Engine, *, salts: int, resets: bool) -> None:
        event = self.dice.random()
        if event < 0.08 and len(engine.scheduler.requests) < MOST_REQUESTS:
            salt = "" if salts == 1 else f"salt-{self.dice.randrange(salts)}"
            answer_count, priority = self.dice.randrange(1, 60), self.dice.randrange(3)
            tokens = prompt(self.dice, self.family_count)
            self.ask(f"{engine.name}{self.event_count}", engine, tokens, answer_count, salt, priority=priority)
        elif event < 0.10 and engine.scheduler.requests:
            name = self.dice.choice([*engine.scheduler.requests])
            self.aborted.add(name)
            engine.abort(name)
        elif event < 0.103 and resets:
            # What is under way is answered by weights of both kinds: nobody can say what.
            self.aborted.update(engine.scheduler.requests)
            self.weights += 1
            engine.take_weights(self.weights, preempt=self.dice.random() < 0.5)
        elif event < 0.5 and engine.may_schedule:
            engine.schedule()
        elif event < 0.65:
            engine.run()
        elif engine.under_way:
            engine.update()


class Churn(Events):
    """Two engines on a pool of this process. `mutate` breaks each of their schedulers on purpose."""

    def __init__(
        self,
        *,
        asynchronous: bool,
        seed: int,
        block_count: int = BLOCK_COUNT,
        policy: str = "fcfs",
        family_count: int = 4,
        chunk_tokens: int = 0,
        mutate: Mutation | None = None,
    ) -> None:
        super().__init__(seed, family_count)
        self.owner = FakeOwner(block_count)
        for name in ("a", "b"):
            config = vllm_config(asynchronous=asynchronous, policy=policy, chunk_tokens=chunk_tokens)
            session = self.owner.session()
            engine = Engine(name, self.world, session, config, block_count, mutate, session.store)
            engine.watch_returns(self.owner)
            self.engines.append(engine)

    def run(self, event_count: int = EVENT_COUNT, *, salts: int = 1, resets: bool = False) -> None:
        """Lets so many events happen, then no more requests come."""
        self.happen(event_count, salts=salts, resets=resets)
        self.drain()

    def drain(self, loops: int = DRAIN_LOOPS) -> None:
        """Goes on until everything is answered; raises AssertionError if that does not come about."""
        for _ in range(loops):
            if not any(engine.busy for engine in self.engines):
                return
            for engine in self.engines:
                engine.step()
        left = {engine.name: [*engine.scheduler.requests] for engine in self.engines}
        raise AssertionError(f"after {loops} more steps of each there are still {left}")

    def check(self) -> None:
        """Nothing is held, every block can be had, and each answer is that of an engine without a cache."""
        for engine in self.engines:
            assert not any(len(store) for store in engine.calls.stores)
            assert not engine.calls.direct
            assert not engine.scheduler._pool.held
            assert len(engine.scheduler._pool.cached_block_hash_to_block) == 0
            assert not engine.scheduler._room.free_count
        assert not self.owner.queue
        assert not self.owner.marks, "[E18]"
        assert self.owner.available(set()) == len(self.owner.blocks) - 1
        self.check_answers()
