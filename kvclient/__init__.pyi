"""The public names as type checkers see them: what __init__.py loads when it is first used."""

__version__: str

from kvclient import hf as hf
from kvclient._core import Chain as Chain
from kvclient._core import copy_into as copy_into
from kvclient._core import crc32c as crc32c
from kvclient.blocks.keys import chain as chain
from kvclient.blocks.layout import Layout as Layout
from kvclient.client.client import KVClient as KVClient
from kvclient.client.client import metrics as metrics
from kvclient.client.connect import connect as connect
from kvclient.errors import BlockLost as BlockLost
from kvclient.errors import Closed as Closed
from kvclient.errors import DeadlineExceeded as DeadlineExceeded
from kvclient.errors import IncompatibleVersion as IncompatibleVersion
from kvclient.errors import InvalidArgument as InvalidArgument
from kvclient.errors import KVClientError as KVClientError
from kvclient.errors import LayoutLost as LayoutLost
from kvclient.errors import NoSpace as NoSpace
from kvclient.errors import NotPermitted as NotPermitted
from kvclient.errors import PagesExhausted as PagesExhausted
from kvclient.errors import PinsExhausted as PinsExhausted
from kvclient.errors import Unavailable as Unavailable
from kvclient.testing.in_memory import InMemoryClient as InMemoryClient
