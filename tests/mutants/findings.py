"""What a plan finds, in a world of its own."""

from __future__ import annotations

import tempfile

from tests.mutants.plans import Plan
from tests.mutants.virtual import run
from tests.mutants.world import World


def findings(plan: Plan, backend: str = "asyncio") -> dict[str, str]:
    """Run a plan; check -> the first thing it found."""
    with tempfile.TemporaryDirectory() as directory:
        world: World

        async def main() -> None:
            nonlocal world
            world = World(plan, directory)
            await world.run()

        try:
            run(main, backend)
        except Exception as error:
            world.find(type(error).__name__, f"the run ended with it: {error}")
        return world.findings
