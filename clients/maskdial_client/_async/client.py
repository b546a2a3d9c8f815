"""AsyncClient: every method of the API."""

from maskdial_client._async.classify import AsyncClassify
from maskdial_client._async.decide import AsyncDecide
from maskdial_client._async.embed import AsyncEmbed
from maskdial_client._async.fill_mask import AsyncFillMask
from maskdial_client._async.generate import AsyncGenerate
from maskdial_client._async.server import AsyncServer
from maskdial_client._async.spans import AsyncSpans
from maskdial_client._async.stream import AsyncStream
from maskdial_client._async.text_to_text import AsyncTextToText
from maskdial_client._async.tokens import AsyncTokens


class AsyncClient(
    AsyncFillMask,
    AsyncClassify,
    AsyncDecide,
    AsyncSpans,
    AsyncEmbed,
    AsyncTokens,
    AsyncGenerate,
    AsyncStream,
    AsyncTextToText,
    AsyncServer,
):
    """A client for one maskdial server, for use in a single event loop.

    ``timeout`` is how many seconds to wait for data before giving up (None: forever); connecting
    may take five of them at most. Each task takes a ``timeout`` of its own. ``api_key`` is sent as
    a bearer token; ``policy`` names policies that all requests ask for, with commas. Requests that
    the server turns away with status 429 or 503 are retried according to ``retry``, with ``sleep``
    between attempts. ``transport`` sends them in another way than over the network, as in httpx.

    ``model`` names a served model, and can be left out if only one of them fits the task.
    Parameters not listed here are sent as they are; the server rejects the ones it does not know.

    Every method raises ApiError (one subclass per error type) if the server replies with an error,
    TransportError if no complete reply arrives, and ProtocolError if the reply does not follow the
    API.
    """
