"""How many examples a property test draws."""

from hypothesis import settings


def draws(count, times=5, **options):
    """Settings with `count` examples in a default run, and `times` as many in `make test-all`.

    A test that asks for a number of its own would draw as few there.
    """
    usual = settings.get_profile("default").max_examples
    many = settings().max_examples > usual
    return settings(max_examples=count * (times if many else 1), **options)
