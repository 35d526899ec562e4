"""Goal: nothing is lost between the two ends of a guest's connection. Method: the gate's ends with transports
that note what they are told, in the orders that Python's releases have."""

import asyncio

from kvstored.access.peer_proxy import _End


class Noted(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.said, self.reading = [], True

    def write(self, data):
        self.said.append(data)

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True


def test_what_one_end_hears_before_the_other_is_there_is_passed_on():
    """Python 3.11.2 (Debian 12) reads on although connection_made() paused it: the first frame was lost."""

    async def meet():
        loop = asyncio.get_running_loop()
        near, far = _End(loop), _End(loop)
        near.other, far.other = far, near
        of_near, of_far = Noted(), Noted()
        far.connection_made(of_far)
        assert not of_far.reading
        far.data_received(b"settings, ")
        far.data_received(b"first")
        near.connection_made(of_near)
        far.data_received(b", then more")
        near.data_received(b"preface")
        assert b"".join(of_near.said) == b"settings, first, then more"
        assert of_far.said == [b"preface"] and of_far.reading

    asyncio.run(meet())
