"""Where the conformance suite was promised; it lies in kvclient.testing.conformance."""

from kvclient.testing.conformance import StoreConformance

__all__ = ["StoreConformance"]
