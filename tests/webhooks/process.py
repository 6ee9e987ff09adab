"""A process that fans out and delivers until nothing is left: `python -m tests.webhooks.process`.

It signs with the keys of the tests and may send to loopback.
"""

from tests.webhooks.conftest import LOOPBACK, deliveries_of, store_of

from tenuto import app
from tenuto.settings import load
from tenuto.webhooks.deliver import deliver_once
from tenuto.webhooks.sender import Sender
from tenuto.webhooks.url_guard import UrlGuard


async def main() -> None:
    async with app.connect(load()) as engine:
        deliveries = deliveries_of(store_of(engine))
        while await deliveries.fan_out_once():
            pass
        while await deliver_once(deliveries, Sender(UrlGuard(LOOPBACK))):
            pass


app.run(main())
