"""What a CUDA driver answers in the corners that sharing memory depends on: one small program a question.

    python -m tests.emulated_gpu.conformance [NAME ...] > answers.json

Asked of the emulator the answers are `conformance.emulator.json`; asked of a real GPU
(`make test-gpu`) the differences are where the emulator is wrong.  Each probe runs in a process
of its own, as some spoil the context, and needs cuda-python alone.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["RECORDED", "differences", "probe"]

RECORDED = Path(__file__).with_name("conformance.emulator.json")

Answer = object
"""Whatever JSON can carry."""

PREAMBLE = """
import ctypes, json, os
import cuda.bindings.driver as d

def call(name, *args):
    return getattr(d, name)(*args)

def ok(name, *args):
    result, *values = call(name, *args)
    assert result == 0, (name, result.name)
    return values[0] if len(values) == 1 else values or None

def code(name, *args):
    return call(name, *args)[0].name

POSIX_FD = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NO_TYPE = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
DEVICE = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
READ = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
WRITE = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
RECOMMENDED = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED

def properties(handle_type=POSIX_FD):
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = DEVICE
    p.location.id = 0
    p.requestedHandleTypes = handle_type
    return p

def location():
    l = d.CUmemLocation()
    l.type = DEVICE
    l.id = 0
    return l

def access(flags):
    a = d.CUmemAccessDesc()
    a.location.type = DEVICE
    a.location.id = 0
    a.flags = flags
    return a

def create(n=1, handle_type=POSIX_FD):
    return ok('cuMemCreate', n * G, properties(handle_type), 0)

def reserve(n=1):
    return ok('cuMemAddressReserve', n * G, 0, 0, 0)

def mapped(handle, n=1, flags=WRITE):
    p = reserve(n)
    ok('cuMemMap', p, n * G, 0, handle, 0)
    if flags is not None:
        ok('cuMemSetAccess', p, n * G, [access(flags)], 1)
    return int(p)

def two_mappings():
    p = int(reserve(2))
    ok('cuMemMap', p, G, 0, create(), 0)
    ok('cuMemMap', p + G, G, 0, create(), 0)
    return p

def export(handle):
    return ok('cuMemExportToShareableHandle', handle, POSIX_FD, 0)

def import_(fd):
    return ok('cuMemImportFromShareableHandle', fd, POSIX_FD)

def import_code(fd):
    return code('cuMemImportFromShareableHandle', fd, POSIX_FD)

def free():
    return ok('cuMemGetInfo')[0]

def first(p, n=1):
    out = bytearray(n)
    ok('cuMemcpyDtoH', out, p, n)
    return list(out)

def afterwards(*codes):
    return [*codes, code('cuCtxSynchronize'), code('cuMemGetInfo')]

ok('cuInit', 0)
if CONTEXT:
    ok('cuCtxSetCurrent', ok('cuDevicePrimaryCtxRetain', ok('cuDeviceGet', 0)))
G = ok('cuMemGetAllocationGranularity', properties(), MINIMUM)
"""

WITHOUT_CONTEXT = {
    "create_no_ctx": "out = code('cuMemCreate', G, properties(), 0)",
    "map_no_ctx": """
handle, p = create(), reserve()
out = [code('cuMemMap', p, G, 0, handle, 0), code('cuMemSetAccess', p, G, [access(WRITE)], 1)]
""",
    "import_no_ctx": "out = import_code(export(create()))",
}

PROBES = WITHOUT_CONTEXT | {
    # ---------------------------------------------------------------------- physical memory
    "gran": "out = G",
    "gran_recommended": "out = ok('cuMemGetAllocationGranularity', properties(), RECOMMENDED)",
    "create_unaligned": "out = code('cuMemCreate', G + 4096, properties(), 0)",
    "create_zero": "out = code('cuMemCreate', 0, properties(), 0)",
    "create_huge": "out = code('cuMemCreate', 1 << 46, properties(), 0)",
    "release_twice": "h = create(); out = [code('cuMemRelease', h), code('cuMemRelease', h)]",
    "release_then_use_mapping": "h = create(); p = mapped(h); ok('cuMemRelease', h); out = code('cuMemsetD8', p, 1, G)",
    "retain_equals_handle": """
h = create()
out = int(ok('cuMemRetainAllocationHandle', mapped(h) + 5)) == int(h)
""",
    "meminfo_drop_on_create": """
before = free()
h = create(16)
during = free()
ok('cuMemRelease', h)
out = {'create': (before - during) // G, 'back': (before - free()) // G}
""",
    # -------------------------------------------------------------------- virtual addresses
    "reserve_4k": "out = code('cuMemAddressReserve', 4096, 0, 0, 0)",
    "reserve_3": "out = code('cuMemAddressReserve', 3, 0, 0, 0)",
    "reserve_default_alignment_is_granularity": "out = int(reserve()) % G == 0",
    "free_wrong_size": "p = reserve(2); out = code('cuMemAddressFree', p, G)",
    "free_while_mapped": "out = code('cuMemAddressFree', mapped(create()), G)",
    "map_part_of_alloc": "out = code('cuMemMap', reserve(), G, 0, create(2), 0)",
    "map_offset": "out = code('cuMemMap', reserve(), G, G, create(2), 0)",
    "map_too_big": "out = code('cuMemMap', reserve(2), 2 * G, 0, create(), 0)",
    "map_over_map": "h = create(); p = mapped(h); out = code('cuMemMap', p, G, 0, h, 0)",
    "map_twice_same_alloc": """
h = create()
a, b = mapped(h), mapped(h, 1, READ)
ok('cuMemsetD8', a, 9, G)
out = first(b, 4)
""",
    "map_again_where_it_was": """
h = create()
p = mapped(h)
ok('cuMemsetD8', p, 7, G)
ok('cuMemUnmap', p, G)
out = [code('cuMemMap', p, G, 0, h, 0), code('cuMemSetAccess', p, G, [access(READ)], 1), first(p)]
""",
    "unmap_half": "out = code('cuMemUnmap', mapped(create(2), 2), G)",
    "unmap_two_maps_at_once": "out = code('cuMemUnmap', two_mappings(), 2 * G)",
    "setaccess_half": "out = code('cuMemSetAccess', mapped(create(2), 2, None), G, [access(WRITE)], 1)",
    "setaccess_two_maps": "out = code('cuMemSetAccess', two_mappings(), 2 * G, [access(WRITE)], 1)",
    "setaccess_unmapped": "out = code('cuMemSetAccess', reserve(), G, [access(WRITE)], 1)",
    "downgrade_rw_to_ro": "out = code('cuMemSetAccess', mapped(create()), G, [access(READ)], 1)",
    "getaccess_default": "out = int(ok('cuMemGetAccess', location(), mapped(create(), 1, None)))",
    "getaccess_ro": "out = int(ok('cuMemGetAccess', location(), mapped(create(), 1, READ)))",
    "address_range": """
p = mapped(create(2), 2)
base, n = ok('cuMemGetAddressRange', p + G + 7)
out = [int(base) - p, n // G]
""",
    "address_range_unmapped": "out = code('cuMemGetAddressRange', reserve())",
    # ------------------------------------------------------------------- export and import
    "export_without_type": "out = code('cuMemExportToShareableHandle', create(1, NO_TYPE), POSIX_FD, 0)",
    "export_fd_flags": """
fd = export(create())
kind = os.readlink(f'/proc/self/fd/{fd}').split(':')[0]
out = {'cloexec': not os.get_inheritable(fd), 'size': os.fstat(fd).st_size, 'link': kind}
""",
    "export_twice_distinct": "h = create(); out = export(h) != export(h)",
    "import_same_process": """
h = create()
fd = export(h)
i = import_(fd)
os.close(fd)
out = {'same_handle': int(i) == int(h), 'maps': mapped(i) > 0}
""",
    "import_twice": "fd = export(create()); a, b = import_(fd), import_(fd); out = {'same_handle': int(a) == int(b)}",
    "import_fd_still_open_after": "fd = export(create()); import_(fd); os.close(fd); out = 'caller must close'",
    "import_device_of_properties": """
out = ok('cuMemGetAllocationPropertiesFromHandle', import_(export(create()))).location.id
""",
    "import_devnull": "out = import_code(os.open('/dev/null', os.O_RDWR))",
    "import_memfd": "out = import_code(os.memfd_create('x'))",
    "import_closed": "out = import_code(999)",
    "import_minus1": """
try:
    out = import_code(-1)
except TypeError:
    out = 'TypeError'
""",
    "alive_after_exporter_released": """
h = create()
p = mapped(h)
ok('cuMemsetD8', p, 5, G)
fd = export(h)
ok('cuMemUnmap', p, G)
ok('cuMemRelease', h)
out = first(mapped(import_(fd), 1, READ))[0]
""",
    "alive_by_mapping_alone": """
h = create()
ok('cuMemsetD8', mapped(h), 6, G)
i = import_(export(h))
q = mapped(i, 1, READ)
ok('cuMemRelease', i)
out = first(q)[0]
""",
    "fd_alone_keeps_memory": """
before = free()
h = create(16)
fd = export(h)
ok('cuMemRelease', h)
during = free()
os.close(fd)
out = {'held': (before - during) // G, 'after_close': (before - free()) // G}
""",
    # --------------------------------------------------------------------------- pointers
    "ptr_attrs": """
p = mapped(create())
shown = ('MEMORY_TYPE', 'DEVICE_ORDINAL', 'IS_LEGACY_CUDA_IPC_CAPABLE', 'MAPPED', 'ALLOWED_HANDLE_TYPES',
         'ACCESS_FLAGS', 'RANGE_SIZE', 'MAPPING_SIZE', 'CONTEXT')
out = {}
for attribute in d.CUpointer_attribute:
    name = attribute.name.removeprefix('CU_POINTER_ATTRIBUTE_')
    if name != 'P2P_TOKENS':
        result, value = call('cuPointerGetAttribute', attribute, p)
        out[name] = [result.name, str(value)[:40] if name in shown else '-']
""",
    # ----------------------------------------------------------------------------- copies
    "memcpy_unified": """
p, q = mapped(create()), mapped(create())
source = (ctypes.c_uint8 * 4)(1, 2, 3, 4)
target = (ctypes.c_uint8 * 4)()
codes = [code('cuMemcpy', p, ctypes.addressof(source), 4), code('cuMemcpy', q, p, 4)]
codes += [code('cuMemcpy', ctypes.addressof(target), q, 4), code('cuCtxSynchronize')]
out = [codes, list(target)]
""",
    "memcpy_unmapped": "out = [code('cuMemcpyHtoD', reserve(), b'ab', 2), code('cuCtxSynchronize')]",
    "memcpy_noaccess": "out = afterwards(code('cuMemcpyHtoD', mapped(create(), 1, None), b'ab', 2))",
    "memcpy_to_ro": "out = afterwards(code('cuMemcpyHtoD', mapped(create(), 1, READ), b'ab', 2))",
    "memset_ro": "out = afterwards(code('cuMemsetD8', mapped(create(), 1, READ), 1, 2))",
    "memcpy_past_end": """
p = mapped(create())
out = [code('cuMemcpyDtoH', bytearray(8), p + G - 4, 8), code('cuCtxSynchronize')]
""",
    "host_touch": "ctypes.string_at(mapped(create()), 1); out = 'readable from the host'",
    # ------------------------------------------------------------------ processes, contexts
    "fork_child": """
mapped(create())
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(w, (code('cuMemGetInfo') + ',' + code('cuInit', 0)).encode())
    os._exit(0)
os.waitpid(pid, 0)
out = os.read(r, 200).decode()
""",
    "ctx_released": "ok('cuDevicePrimaryCtxRelease', ok('cuDeviceGet', 0)); out = code('cuMemGetInfo')",
}


ALONE = {"meminfo_drop_on_create", "fd_alone_keeps_memory"}
"""They measure the device's free memory, which others would change meanwhile."""


def probe(names: Collection[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, Answer]:
    """Ask this machine's driver, or that of `environment`, the named questions (none: all)."""
    chosen = [name for name in PROBES if not names or name in names]
    with ThreadPoolExecutor(2) as pool:
        together = [name for name in chosen if name not in ALONE]
        answers = dict(zip(together, pool.map(lambda name: _ask(name, environment), together), strict=True))
    answers |= {name: _ask(name, environment) for name in chosen if name in ALONE}
    return {name: answers[name] for name in chosen}


def differences(answers: Mapping[str, Answer], recorded: Mapping[str, Answer]) -> list[str]:
    """One line for each question that the two answer otherwise."""
    return [
        f"{name}: {answers.get(name)!r} where {recorded.get(name)!r} was recorded"
        for name in sorted(answers.keys() | recorded.keys())
        if answers.get(name) != recorded.get(name)
    ]


def _ask(name: str, environment: Mapping[str, str] | None) -> Answer:
    context = name not in WITHOUT_CONTEXT
    program = f"CONTEXT = {context}\n{PREAMBLE}{PROBES[name]}\nprint('OUT' + json.dumps(out, default=str))\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    for line in done.stdout.splitlines():
        if line.startswith("OUT"):
            answer: Answer = json.loads(line.removeprefix("OUT"))
            return answer
    return {"rc": done.returncode, "err": done.stderr.strip().splitlines()[-1:]}


if __name__ == "__main__":
    json.dump(probe(sys.argv[1:]), sys.stdout, indent=1)
    print()
