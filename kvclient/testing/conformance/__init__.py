"""The conformance suite: what every door into a store must do, as an abstract class of cases.

    class TestMyStore(kvclient.testing.conformance.StoreConformance):
        def connect(self, **options):       # a new client on the same, empty store of at least 64 MiB
            return ...

Cases are methods named test_*, with plain asserts: pytest runs them as they are, and so does anything that
calls setup_method, the case and teardown_method. After each case the suite closes every client and demands
that the memory in use is exactly what it was before. A door without some ability names it in `lacks`; the
cases that need it are skipped. Never imports pytest, torch or a daemon.
"""

from kvclient.testing.conformance.following import FollowingCases
from kvclient.testing.conformance.pressure import PressureCases
from kvclient.testing.conformance.reading import ReadingCases
from kvclient.testing.conformance.searching import SearchingCases
from kvclient.testing.conformance.unwritten import UnwrittenCases
from kvclient.testing.conformance.writing import WritingCases

__all__ = ["StoreConformance"]


class StoreConformance(
    WritingCases, UnwrittenCases, ReadingCases, SearchingCases, FollowingCases, PressureCases
):
    """All cases. Subclass, implement connect(), and let pytest collect it."""
