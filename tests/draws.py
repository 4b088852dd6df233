"""How many examples a property test draws."""

from hypothesis import settings


def draws(count, **options):
    """Settings with `count` examples in a default run, and five times as many in `make test-all`.

    A test that asks for a number of its own would draw as few there.
    """
    usual = settings.get_profile("default").max_examples
    times = settings().max_examples // usual
    return settings(max_examples=count * times, **options)
