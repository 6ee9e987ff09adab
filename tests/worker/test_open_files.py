"""Sessions of a process with many open files."""

import os
import resource

from tenuto.worker.session import Supervisor


async def test_supervisor_of_a_process_with_many_open_files_starts() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    supervisor = Supervisor()
    try:
        session = await supervisor.spawn(["/bin/true"], cwd=None, env={})
        assert (await session.wait()).exit_code == 0
    finally:
        await supervisor.close()
        for item in taken:
            os.close(item)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
