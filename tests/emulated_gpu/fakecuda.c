/* fakecuda: a CPU-only stand-in for the part of the CUDA driver API that memory
 * sharing through VMM needs. TEST ONLY. "Physical device memory" is a sealed
 * memfd; a "device pointer" is an ordinary mmap of it.
 *
 * Built by emulator.py.
 * ABI check against a real toolkit header (compile only):
 *         gcc -DFAKECUDA_USE_CUDA_H -I$CUDA/include -c -o /dev/null fakecuda.c
 *
 * Environment (read once, at the first API call):
 *   FAKECUDA_DEVICES=2            number of physical devices (CUDA_VISIBLE_DEVICES is honoured)
 *   FAKECUDA_MEM_MB=8192          memory of each device; cuMemCreate past it is OUT_OF_MEMORY,
 *                                 counted over every process of the same FAKECUDA_GROUP
 *   FAKECUDA_GROUP=default        keeps concurrent test sessions apart
 *   FAKECUDA_DRIVER_VERSION=13000 cuDriverGetVersion; newer entry points are not found
 *   FAKECUDA_ATTR=102=0,103=0     cuDeviceGetAttribute overrides
 *   FAKECUDA_P2P=1                peer access between devices
 *   FAKECUDA_HOST_ACCESS=1        0: device pointers fault when the host touches them
 *   FAKECUDA_STRICT_CTX=0         1: VMM calls need a current context too
 *   FAKECUDA_FAIL=name:n:act,...  n = 3 | 3+ | *   act = 2 | OUT_OF_MEMORY | kill | exit=7 | sleep=50
 *   FAKECUDA_LOG=path             one line a call: pid tid seq name result detail
 *   FAKECUDA_PROCLOG=path         names asked of cuGetProcAddress and not implemented
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef FAKECUDA_USE_CUDA_H
#include <cuda.h>
#else /* the few types that are needed, by their ABI (Linux, LP64) */
typedef int CUresult, CUdevice, CUdevice_attribute, CUpointer_attribute;
typedef int CUmemAllocationHandleType, CUmemAllocationGranularity_flags, CUstreamCaptureStatus;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle, cuuint64_t;
typedef int CUdriverProcAddressQueryResult;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { int type, id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;
#endif

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, E_VALUE = 1, E_OOM = 2, E_NOINIT = 3, E_NODEV = 100, E_DEV = 101, E_CTX = 201, E_HANDLE = 400,
       E_NOTFOUND = 500, E_ADDR = 700, E_CTXGONE = 709, E_PERM = 800, E_UNSUP = 801 };
enum { MAXDEV = 16, GRAN = 2 << 20 };

static const struct { int code; const char *name, *text; } ERRS[] = {
    {0, "CUDA_SUCCESS", "no error"}, {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}, {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"}, {34, "CUDA_ERROR_STUB_LIBRARY", "stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}, {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping failed"}, {208, "CUDA_ERROR_ALREADY_MAPPED", "already mapped"},
    {211, "CUDA_ERROR_NOT_MAPPED", "not mapped"}, {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access unsupported"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed"}, {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"}, {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"}, {719, "CUDA_ERROR_LAUNCH_FAILED", "launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"}, {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"}, {999, "CUDA_ERROR_UNKNOWN", "unknown error"}};
#define NERRS (sizeof ERRS / sizeof *ERRS)

/* ---------------------------------------------------------------- state -- */
typedef struct { int fd, dev, htypes, rdma, href, mref, imported; size_t size; ino_t ino; } Alloc;     /* handle = index + HBASE */
typedef struct { uintptr_t base; size_t size; } Resv;
typedef struct { uintptr_t base; size_t size; int alloc, dev; unsigned char *shadow, acc[MAXDEV]; unsigned long long id; } Map;
struct CUctx_st { int dev, refs, sticky; unsigned flags; };
struct CUstream_st { int magic; unsigned flags; int prio; CUcontext ctx; unsigned long long id; };
struct CUevent_st { int magic; unsigned flags; CUcontext ctx; struct timespec t; int recorded; };
typedef struct { char name[64]; long from, to; char act[32]; long seen; } Fault;

enum { HBASE = 0x1000, MAGIC_S = 0x53545231, MAGIC_E = 0x45565431 };
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pid_t init_pid;
static int ndev, vis[MAXDEV], nphys, p2p, host_access, strict_ctx, version, logfd = -1;
static unsigned long long devmem;
static char group[32], attrs[256], proclog[512];
static struct CUctx_st primary[MAXDEV];
static Alloc *A; static int nA;
static Resv *R; static int nR;
static Map *M; static int nM;
static int nstream, nevent;
static unsigned long long seq, nextid = 1;
static Fault F[32]; static int nF;
static __thread CUcontext stack[32]; static __thread int sp;
static __thread char note_buf[160];

static void note(const char *f, ...) { va_list a; va_start(a, f); vsnprintf(note_buf, sizeof note_buf, f, a); va_end(a); }
static const char *env(const char *k, const char *d) { const char *v = getenv(k); return v && *v ? v : d; }
static void make_uuid(int phys, unsigned char *u) {
    memcpy(u, "FAKECUDA", 8); memset(u + 8, 0, 8);
    u[8] = (unsigned char)atoi(env("FAKECUDA_SEED", "0")); u[15] = (unsigned char)phys;
}
static int parse_visible(const char *s) {   /* ordinals or GPU-<hex prefix>; stops at the first bad entry, like the driver */
    int n = 0;
    while (*s && n < MAXDEV) {
        char tok[80]; size_t k = strcspn(s, ",");
        snprintf(tok, sizeof tok, "%.*s", (int)k, s); s += k + (s[k] == ',');
        int hit = -1;
        if (!strncmp(tok, "GPU-", 4)) {
            for (int p = 0; p < nphys; p++) {
                unsigned char u[16]; char h[64], *w = h; make_uuid(p, u);
                for (int i = 0; i < 16; i++) w += sprintf(w, "%02x%s", u[i], i == 3 || i == 5 || i == 7 || i == 9 ? "-" : "");
                if (!strncasecmp(h, tok + 4, strlen(tok + 4))) { hit = p; break; }
            }
        } else { char *e; long v = strtol(tok, &e, 10); if (e != tok && v >= 0 && v < nphys) hit = (int)v; }
        if (hit < 0) break;
        vis[n++] = hit;
    }
    return n;
}
static void parse_faults(const char *spec) {
    nF = 0;
    while (spec && *spec && nF < 32) {
        size_t k = strcspn(spec, ","); char item[160]; snprintf(item, sizeof item, "%.*s", (int)k, spec);
        spec += k + (spec[k] == ',');
        char *n = strchr(item, ':'), *a = n ? strchr(n + 1, ':') : NULL;
        if (!a) { fprintf(stderr, "fakecuda: bad FAKECUDA_FAIL item '%s'\n", item); _exit(98); }
        *n++ = *a++ = 0;
        Fault *f = &F[nF++]; memset(f, 0, sizeof *f);
        snprintf(f->name, sizeof f->name, "%.63s", item); snprintf(f->act, sizeof f->act, "%.31s", a);
        if (*n == '*') { f->from = 1; f->to = LONG_MAX; }
        else { char *e; f->from = strtol(n, &e, 10); f->to = *e == '+' ? LONG_MAX : f->from; }
    }
}
static void child_after_fork(void) {        /* a forked child has no CUDA: drop what keeps memory alive */
    pthread_mutex_init(&mu, NULL);
    for (int i = 0; i < nA; i++) if (A[i].fd >= 0) close(A[i].fd);
    nA = nM = nR = 0;
}
static void setup(void) {
    nphys = atoi(env("FAKECUDA_DEVICES", "2")); if (nphys > MAXDEV) nphys = MAXDEV;
    devmem = strtoull(env("FAKECUDA_MEM_MB", "8192"), NULL, 10) << 20;
    p2p = atoi(env("FAKECUDA_P2P", "1")); host_access = atoi(env("FAKECUDA_HOST_ACCESS", "1"));
    strict_ctx = atoi(env("FAKECUDA_STRICT_CTX", "0")); version = atoi(env("FAKECUDA_DRIVER_VERSION", "13000"));
    snprintf(group, sizeof group, "%s", env("FAKECUDA_GROUP", "default"));
    snprintf(attrs, sizeof attrs, ",%s,", env("FAKECUDA_ATTR", ""));
    snprintf(proclog, sizeof proclog, "%s", env("FAKECUDA_PROCLOG", ""));
    const char *v = getenv("CUDA_VISIBLE_DEVICES");
    if (v) ndev = parse_visible(v); else { ndev = nphys; for (int i = 0; i < nphys; i++) vis[i] = i; }
    for (int i = 0; i < MAXDEV; i++) primary[i].dev = i;
    const char *l = env("FAKECUDA_LOG", NULL);
    if (l) logfd = open(l, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    parse_faults(getenv("FAKECUDA_FAIL"));
    pthread_atfork(NULL, NULL, child_after_fork);
}

/* ------------------------------------------- entry, exit, fault injection -- */
enum { ANY = 0, INIT = 1, CTX = 2, VMM = 3 };
static int same_name(const char *sym, const char *want) {  /* cuMemcpyHtoD_v2 matches cuMemcpyHtoD */
    size_t n = strlen(want);
    return !strncmp(sym, want, n) && (!sym[n] || (sym[n] == '_' && sym[n + 1] == 'v' && isdigit((unsigned char)sym[n + 2])));
}
static int act_code(const char *a) {
    if (isdigit((unsigned char)*a)) return atoi(a);
    for (size_t i = 0; i < NERRS; i++)
        if (!strcmp(ERRS[i].name, a) || (!strncmp(ERRS[i].name, "CUDA_ERROR_", 11) && !strcmp(ERRS[i].name + 11, a))) return ERRS[i].code;
    fprintf(stderr, "fakecuda: unknown action '%s'\n", a); _exit(98);
}
static int enter(const char *name, int need) {
    pthread_once(&once, setup);
    note_buf[0] = 0;
    if (init_pid && getpid() != init_pid) { note("forked child"); pthread_mutex_lock(&mu); return need == ANY ? OK : E_NOINIT; }
    pthread_mutex_lock(&mu);
    seq++;
    for (int i = 0; i < nF; i++) {
        if (!same_name(name, F[i].name)) continue;
        long k = ++F[i].seen;
        if (k < F[i].from || k > F[i].to) continue;
        if (!strcmp(F[i].act, "kill")) kill(getpid(), SIGKILL);
        else if (!strncmp(F[i].act, "exit=", 5)) _exit(atoi(F[i].act + 5));
        else if (!strncmp(F[i].act, "sleep=", 6)) { pthread_mutex_unlock(&mu); usleep((useconds_t)atoi(F[i].act + 6) * 1000); pthread_mutex_lock(&mu); }
        else { note("injected at call %ld", k); return act_code(F[i].act); }
    }
    if (need != ANY && !init_pid) return E_NOINIT;
    if (need == CTX || (need == VMM && strict_ctx)) {
        if (!sp || !stack[sp - 1]) return E_CTX;
        if (!stack[sp - 1]->refs) return E_CTXGONE;
        if (stack[sp - 1]->sticky) { note("sticky"); return stack[sp - 1]->sticky; }
    }
    return OK;
}
static CUresult leave(const char *name, int r) {
    if (logfd >= 0) {
        char b[384]; int n = snprintf(b, sizeof b, "%d %ld %llu %s %d %s\n", getpid(), syscall(SYS_gettid), seq, name, r, note_buf);
        if (n > 0 && write(logfd, b, (size_t)n) < 0) { }
    }
    pthread_mutex_unlock(&mu);
    return (CUresult)r;
}
#define FN(need, name, sig, call)                                                    \
    static int name##_impl sig;                                                      \
    EXPORT CUresult name sig {                                                       \
        int r_ = enter(#name, need);                                                 \
        if (r_ == OK) r_ = name##_impl call;                                         \
        return leave(#name, r_);                                                     \
    }                                                                                \
    static int name##_impl sig
#define UNUSED(x) ((void)(x))

/* ----------------------------------------------------- version and errors -- */
FN(ANY, cuInit, (unsigned int flags), (flags)) {
    if (flags) return E_VALUE;
    if (init_pid && init_pid != getpid()) return E_NOINIT;
    if (!ndev) return E_NODEV;
    init_pid = getpid();
    return OK;
}
FN(ANY, cuDriverGetVersion, (int *v), (v)) { if (!v) return E_VALUE; *v = version; return OK; }
EXPORT CUresult cuGetErrorName(CUresult e, const char **s) {
    for (size_t i = 0; i < NERRS; i++) if (ERRS[i].code == (int)e) { *s = ERRS[i].name; return (CUresult)OK; }
    *s = NULL; return (CUresult)E_VALUE;
}
EXPORT CUresult cuGetErrorString(CUresult e, const char **s) {
    for (size_t i = 0; i < NERRS; i++) if (ERRS[i].code == (int)e) { *s = ERRS[i].text; return (CUresult)OK; }
    *s = NULL; return (CUresult)E_VALUE;
}

/* ---------------------------------------------------------------- devices -- */
#define DEV(d) do { if ((d) < 0 || (d) >= ndev) return E_DEV; } while (0)
FN(INIT, cuDeviceGetCount, (int *n), (n)) { if (!n) return E_VALUE; *n = ndev; return OK; }
FN(INIT, cuDeviceGet, (CUdevice *d, int i), (d, i)) { DEV(i); *d = i; return OK; }
FN(INIT, cuDeviceGetName, (char *s, int n, CUdevice d), (s, n, d)) { DEV(d); snprintf(s, (size_t)n, "FAKECUDA Device %d", vis[d]); return OK; }
FN(INIT, cuDeviceGetUuid_v2, (CUuuid *u, CUdevice d), (u, d)) { DEV(d); make_uuid(vis[d], (unsigned char *)u->bytes); return OK; }
FN(INIT, cuDeviceTotalMem_v2, (size_t *n, CUdevice d), (n, d)) { DEV(d); *n = devmem; return OK; }
FN(INIT, cuDeviceGetPCIBusId, (char *s, int n, CUdevice d), (s, n, d)) { DEV(d); snprintf(s, (size_t)n, "0000:%02X:00.0", vis[d] + 1); return OK; }
FN(INIT, cuDeviceCanAccessPeer, (int *r, CUdevice a, CUdevice b), (r, a, b)) { DEV(a); DEV(b); *r = a != b && p2p; return OK; }
FN(INIT, cuDeviceGetAttribute, (int *v, CUdevice_attribute a, CUdevice d), (v, a, d)) {
    DEV(d); if (!v || (int)a <= 0 || (int)a > 1000) return E_VALUE;
    char key[16]; snprintf(key, sizeof key, ",%d=", (int)a);
    const char *o = strstr(attrs, key);
    if (o) { *v = atoi(o + strlen(key)); return OK; }
    switch ((int)a) {
    case 1: *v = 1024; break;  case 10: *v = 32; break;  case 16: *v = 4; break;      /* threads/block, warp, SMs */
    case 33: *v = vis[d] + 1; break;                                                    /* PCI bus */
    case 75: *v = 9; break;                                                             /* compute capability 9.0 */
    case 40: case 41: case 102: case 103: case 125: *v = 1; break;                      /* async engines, UVA, VMM, POSIX fd, IPC events */
    case 134: *v = 0; break;                                                            /* host NUMA node */
    default: *v = 0;                                                                    /* fabric, pools, RDMA, multicast: no */
    }
    return OK;
}

/* --------------------------------------------------------------- contexts -- */
static int ctx_ok(CUcontext c) { return c >= primary && c < primary + MAXDEV; }
static CUcontext cur(void) { return sp ? stack[sp - 1] : NULL; }
FN(INIT, cuDevicePrimaryCtxRetain, (CUcontext *c, CUdevice d), (c, d)) { DEV(d); primary[d].refs++; *c = &primary[d]; return OK; }
FN(INIT, cuDevicePrimaryCtxRelease_v2, (CUdevice d), (d)) { DEV(d); if (!primary[d].refs) return E_CTX; if (!--primary[d].refs) primary[d].sticky = 0; return OK; }
FN(INIT, cuDevicePrimaryCtxReset_v2, (CUdevice d), (d)) { DEV(d); primary[d].sticky = 0; return OK; }
FN(INIT, cuDevicePrimaryCtxSetFlags_v2, (CUdevice d, unsigned int f), (d, f)) { DEV(d); primary[d].flags = f; return OK; }
FN(INIT, cuDevicePrimaryCtxGetState, (CUdevice d, unsigned int *f, int *on), (d, f, on)) { DEV(d); *f = primary[d].flags; *on = primary[d].refs > 0; return OK; }
FN(INIT, cuCtxGetCurrent, (CUcontext *c), (c)) { *c = cur(); return OK; }
FN(INIT, cuCtxSetCurrent, (CUcontext c), (c)) {
    if (!c) { if (sp) sp--; return OK; }
    if (!ctx_ok(c)) return E_CTX;
    if (!c->refs) return E_CTXGONE;
    if (!sp) sp = 1;
    stack[sp - 1] = c; return OK;
}
FN(INIT, cuCtxPushCurrent_v2, (CUcontext c), (c)) {
    if (!ctx_ok(c)) return E_CTX;
    if (!c->refs) return E_CTXGONE;
    if (sp == 32) return E_VALUE;
    stack[sp++] = c; return OK;
}
FN(INIT, cuCtxPopCurrent_v2, (CUcontext *c), (c)) { if (!sp) return E_CTX; sp--; if (c) *c = stack[sp]; return OK; }
FN(CTX, cuCtxGetDevice, (CUdevice *d), (d)) { *d = cur()->dev; return OK; }
FN(INIT, cuCtxGetDevice_v2, (CUdevice *d, CUcontext c), (d, c)) { if (!c) c = cur(); if (!ctx_ok(c)) return E_CTX; *d = c->dev; return OK; }
FN(CTX, cuCtxSynchronize, (void), ()) { return OK; }
FN(INIT, cuCtxSynchronize_v2, (CUcontext c), (c)) { if (!c) c = cur(); return ctx_ok(c) ? OK : E_CTX; }
FN(CTX, cuCtxGetFlags, (unsigned int *f), (f)) { *f = cur()->flags; return OK; }
FN(INIT, cuCtxGetApiVersion, (CUcontext c, unsigned int *v), (c, v)) { UNUSED(c); *v = 3020; return OK; }
FN(INIT, cuCtxGetId, (CUcontext c, unsigned long long *id), (c, id)) { if (!c) c = cur(); if (!ctx_ok(c)) return E_CTX; *id = (unsigned long long)c->dev + 1; return OK; }
FN(CTX, cuCtxGetStreamPriorityRange, (int *lo, int *hi), (lo, hi)) { if (lo) *lo = 0; if (hi) *hi = -5; return OK; }

/* ---------------------------------------------------------- VMM: physical -- */
static unsigned long long used_bytes(int phys) {   /* over all processes: unique memfds still held by a descriptor or a mapping */
    ino_t seen[4096]; int ns = 0; unsigned long long sum = 0; char want[80];
    int wl = snprintf(want, sizeof want, "/memfd:fakecuda:%s:d%d:", group, phys);
    DIR *p = opendir("/proc"); struct dirent *e;
    while (p && (e = readdir(p))) {
        if (!isdigit((unsigned char)e->d_name[0])) continue;
        char path[600], link[300]; snprintf(path, sizeof path, "/proc/%.20s/fd", e->d_name);
        DIR *f = opendir(path); struct dirent *g;
        while (f && (g = readdir(f))) {
            snprintf(path, sizeof path, "/proc/%.20s/fd/%.20s", e->d_name, g->d_name);
            ssize_t n = readlink(path, link, sizeof link - 1); struct stat st;
            if (n < wl) continue;
            link[n] = 0;
            if (strncmp(link, want, (size_t)wl) || stat(path, &st)) continue;
            int dup = 0; for (int i = 0; i < ns; i++) dup |= seen[i] == st.st_ino;
            if (!dup && ns < 4096) { seen[ns++] = st.st_ino; sum += (unsigned long long)st.st_size; }
        }
        if (f) closedir(f);
    }
    if (p) closedir(p);
    return sum;
}
static Alloc *get_alloc(CUmemGenericAllocationHandle h) {
    if (h < HBASE || h - HBASE >= (unsigned long long)nA) return NULL;
    Alloc *a = &A[h - HBASE]; return a->fd >= 0 && a->href > 0 ? a : NULL;
}
static void maybe_free(Alloc *a) { if (a->href <= 0 && a->mref <= 0 && a->fd >= 0) { close(a->fd); a->fd = -1; } }
static int new_alloc(Alloc x, CUmemGenericAllocationHandle *h) {
    Alloc *n = realloc(A, sizeof *A * (size_t)(nA + 1)); if (!n) return E_OOM;   /* indices are never reused: a stale handle stays stale */
    A = n; A[nA] = x; *h = HBASE + (unsigned long long)nA++; return OK;
}
static int check_prop(const CUmemAllocationProp *p) {
    if (!p || (int)p->type != 1 || p->win32HandleMetaData) return E_VALUE;      /* PINNED only */
    if ((int)p->location.type != 1) return E_UNSUP;                             /* host and NUMA locations are not emulated */
    if (p->requestedHandleTypes & ~1) return E_UNSUP;                           /* POSIX fd or none */
    DEV(p->location.id); return OK;
}
FN(VMM, cuMemGetAllocationGranularity, (size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags o), (g, p, o)) {
    int r = check_prop(p); if (r) return r;
    if ((int)o < 0 || (int)o > 1) return E_VALUE;
    *g = GRAN; return OK;
}
FN(VMM, cuMemCreate, (CUmemGenericAllocationHandle *h, size_t size, const CUmemAllocationProp *p, unsigned long long flags), (h, size, p, flags)) {
    int r = check_prop(p); if (r) return r;
    if (!h || !size || size % GRAN || flags) return E_VALUE;
    int phys = vis[p->location.id]; char nm[128];
    if (size > devmem || used_bytes(phys) + size > devmem) { note("device %d full", phys); return E_OOM; }
    snprintf(nm, sizeof nm, "fakecuda:%s:d%d:h%d:r%d", group, phys, (int)p->requestedHandleTypes, p->allocFlags.gpuDirectRDMACapable);
    int fd = memfd_create(nm, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return 304;
    struct stat st;
    if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) || fstat(fd, &st)) { close(fd); return E_OOM; }
    Alloc a = {.fd = fd, .dev = phys, .htypes = (int)p->requestedHandleTypes, .rdma = p->allocFlags.gpuDirectRDMACapable, .href = 1, .size = size, .ino = st.st_ino};
    r = new_alloc(a, h); note("h=%llx size=%zu dev=%d ino=%lu", *h, size, phys, (unsigned long)st.st_ino); return r;
}
FN(VMM, cuMemRelease, (CUmemGenericAllocationHandle h), (h)) {
    Alloc *a = get_alloc(h); note("h=%llx", h); if (!a) return E_VALUE;
    a->href--; maybe_free(a); return OK;
}
FN(VMM, cuMemExportToShareableHandle, (void *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType t, unsigned long long flags), (out, h, t, flags)) {
    Alloc *a = get_alloc(h);
    if (!a || !out || flags || (int)t != 1 || !(a->htypes & 1)) return E_VALUE;
    int fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 3); if (fd < 0) return 304;
    *(int *)out = fd; note("h=%llx fd=%d", h, fd); return OK;
}
FN(VMM, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *h, void *os, CUmemAllocationHandleType t), (h, os, t)) {
    int fd = (int)(intptr_t)os; char path[64], link[300], g[64]; int phys, ht, rd; struct stat st;
    if (!h || (int)t != 1) return E_VALUE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, link, sizeof link - 1);
    if (n < 0) { note("fd=%d bad", fd); return E_VALUE; }
    link[n] = 0;
    if (sscanf(link, "/memfd:fakecuda:%63[^:]:d%d:h%d:r%d", g, &phys, &ht, &rd) != 4 || strcmp(g, group) || fstat(fd, &st)) { note("fd=%d is no allocation", fd); return E_VALUE; }
    int seen = 0; for (int i = 0; i < ndev; i++) seen |= vis[i] == phys;
    if (!seen) { note("device %d not visible", phys); return E_DEV; }
    int mine = fcntl(fd, F_DUPFD_CLOEXEC, 3); if (mine < 0) return 304;          /* the caller keeps its own fd and must close it */
    Alloc a = {.fd = mine, .dev = phys, .htypes = ht, .rdma = rd, .href = 1, .imported = 1, .size = (size_t)st.st_size, .ino = st.st_ino};
    int r = new_alloc(a, h); note("h=%llx fd=%d size=%zu dev=%d", *h, fd, a.size, phys); return r;
}
FN(VMM, cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *p, CUmemGenericAllocationHandle h), (p, h)) {
    Alloc *a = get_alloc(h); if (!a || !p) return E_VALUE;
    memset(p, 0, sizeof *p);
    *(int *)&p->type = 1; *(int *)&p->requestedHandleTypes = a->htypes; *(int *)&p->location.type = 1;
    for (int i = 0; i < ndev; i++) if (vis[i] == a->dev) p->location.id = i;
    p->allocFlags.gpuDirectRDMACapable = (unsigned char)a->rdma; return OK;
}

/* ----------------------------------------------------------- VMM: virtual -- */
static Map *map_at(uintptr_t p) { for (int i = 0; i < nM; i++) if (p >= M[i].base && p - M[i].base < M[i].size) return &M[i]; return NULL; }
static int whole_maps(uintptr_t p, size_t n) {      /* [p, p+n) is made of whole mappings, without holes */
    uintptr_t q = p; if (!n) return 0;
    while (q < p + n) { Map *m = map_at(q); if (!m || m->base != q || m->size > p + n - q) return 0; q += m->size; }
    return 1;
}
FN(VMM, cuMemAddressReserve, (CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags), (out, size, align, hint, flags)) {
    long pg = sysconf(_SC_PAGESIZE);
    if (!out || !size || size % (size_t)pg || hint % (unsigned long long)pg || (align & (align - 1)) || flags) return E_VALUE;
    if (align < GRAN) align = GRAN;
    const int fl = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE; void *v = MAP_FAILED;
    if (hint && hint % align == 0) v = mmap((void *)hint, size, PROT_NONE, fl | MAP_FIXED_NOREPLACE, -1, 0);   /* only a hint */
    if (v == MAP_FAILED) {
        unsigned char *w = mmap(NULL, size + align, PROT_NONE, fl, -1, 0); if (w == MAP_FAILED) return E_OOM;
        uintptr_t b = ((uintptr_t)w + align - 1) & ~(uintptr_t)(align - 1);
        if (b > (uintptr_t)w) munmap(w, b - (uintptr_t)w);
        if ((uintptr_t)w + align > b) munmap((void *)(b + size), (uintptr_t)w + align - b);
        v = (void *)b;
    }
    R = realloc(R, sizeof *R * (size_t)(nR + 1)); R[nR++] = (Resv){(uintptr_t)v, size};
    *out = (CUdeviceptr)(uintptr_t)v; note("p=%llx size=%zu", *out, size); return OK;
}
FN(VMM, cuMemAddressFree, (CUdeviceptr p, size_t size), (p, size)) {
    note("p=%llx size=%zu", p, size);
    for (int i = 0; i < nR; i++) {
        if (R[i].base != p || R[i].size != size) continue;
        for (int j = 0; j < nM; j++) if (M[j].base >= p && M[j].base - p < size) { note("still mapped"); return E_VALUE; }
        munmap((void *)(uintptr_t)p, size); R[i] = R[--nR]; return OK;
    }
    return E_VALUE;
}
FN(VMM, cuMemMap, (CUdeviceptr p, size_t size, size_t off, CUmemGenericAllocationHandle h, unsigned long long flags), (p, size, off, h, flags)) {
    Alloc *a = get_alloc(h); note("p=%llx size=%zu h=%llx", p, size, h);
    if (!a || !size || size % GRAN || p % GRAN || off || size > a->size || flags) return E_VALUE;
    int in = 0; for (int i = 0; i < nR; i++) in |= p >= R[i].base && p + size <= R[i].base + R[i].size;
    if (!in) return E_VALUE;
    for (int i = 0; i < nM; i++) if (p < M[i].base + M[i].size && M[i].base < p + size) { note("overlap"); return E_VALUE; }
    void *sh = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0); if (sh == MAP_FAILED) return E_OOM;
    if (mmap((void *)(uintptr_t)p, size, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) == MAP_FAILED) { munmap(sh, size); return E_OOM; }
    madvise(sh, size, MADV_DONTFORK); madvise((void *)(uintptr_t)p, size, MADV_DONTFORK);
    M = realloc(M, sizeof *M * (size_t)(nM + 1));
    M[nM] = (Map){.base = p, .size = size, .alloc = (int)(h - HBASE), .dev = a->dev, .shadow = sh, .id = nextid++};
    nM++; a->mref++; return OK;
}
FN(VMM, cuMemUnmap, (CUdeviceptr p, size_t size), (p, size)) {
    note("p=%llx size=%zu", p, size); if (!whole_maps(p, size)) return E_VALUE;
    for (int i = nM - 1; i >= 0; i--) {
        if (M[i].base < p || M[i].base >= p + size) continue;
        mmap((void *)M[i].base, M[i].size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        munmap(M[i].shadow, M[i].size); A[M[i].alloc].mref--; maybe_free(&A[M[i].alloc]); M[i] = M[--nM];
    }
    return OK;
}
FN(VMM, cuMemSetAccess, (CUdeviceptr p, size_t size, const CUmemAccessDesc *d, size_t n), (p, size, d, n)) {
    note("p=%llx size=%zu n=%zu flags=%d dev=%d", p, size, n, n ? (int)d->flags : -1, n ? d->location.id : -1);
    if (!whole_maps(p, size) || !d || !n) return E_VALUE;
    for (size_t k = 0; k < n; k++) {
        int f = (int)d[k].flags;
        if ((int)d[k].location.type != 1 || (f != 0 && f != 1 && f != 3)) return E_VALUE;
        DEV(d[k].location.id);
        for (int i = 0; i < nM; i++) if (M[i].base >= p && M[i].base < p + size && M[i].dev != vis[d[k].location.id] && !p2p) return E_DEV;
    }
    for (int i = 0; i < nM; i++) {
        if (M[i].base < p || M[i].base >= p + size) continue;
        for (size_t k = 0; k < n; k++) M[i].acc[d[k].location.id] = (unsigned char)d[k].flags;
        int u = 0; for (int k = 0; k < MAXDEV; k++) u |= M[i].acc[k];
        int prot = !host_access || !u ? PROT_NONE : u & 2 ? PROT_READ | PROT_WRITE : PROT_READ;
        if (mprotect((void *)M[i].base, M[i].size, prot)) return 304;
    }
    return OK;
}
FN(VMM, cuMemGetAccess, (unsigned long long *f, const CUmemLocation *l, CUdeviceptr p), (f, l, p)) {
    Map *m = map_at(p); if (!m || !f || !l || (int)l->type != 1) return E_VALUE;
    DEV(l->id); *f = m->acc[l->id]; return OK;
}
FN(VMM, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *h, void *p), (h, p)) {
    Map *m = map_at((uintptr_t)p); if (!m) return E_VALUE;
    A[m->alloc].href++; *h = HBASE + (unsigned long long)m->alloc; return OK;
}
FN(CTX, cuMemGetAddressRange_v2, (CUdeviceptr *b, size_t *n, CUdeviceptr p), (b, n, p)) {
    Map *m = map_at(p); if (!m) return E_NOTFOUND;
    if (b) *b = m->base;
    if (n) *n = m->size;
    return OK;
}
FN(CTX, cuMemGetInfo_v2, (size_t *f, size_t *t), (f, t)) {
    unsigned long long u = used_bytes(vis[cur()->dev]); *f = u > devmem ? 0 : devmem - u; *t = devmem; return OK;
}
static int ptr_attr(void *out, int a, CUdeviceptr p) {
    Map *m = map_at(p);
    if (a == 13) { *(unsigned *)out = m != NULL; return OK; }
    if (!m || !out) return E_VALUE;
    int ord = 0; for (int i = 0; i < ndev; i++) if (vis[i] == m->dev) ord = i;
    switch (a) {
    case 1: *(CUcontext *)out = NULL; break;                        /* CONTEXT: VMM memory belongs to none */
    case 2: *(unsigned *)out = 2; break;                            /* MEMORY_TYPE: device */
    case 3: *(CUdeviceptr *)out = p; break;
    case 7: case 20: *(unsigned long long *)out = m->id; break;
    case 6: case 8: case 10: case 15: *(unsigned *)out = 0; break;  /* SYNC_MEMOPS, MANAGED, LEGACY_IPC, RDMA */
    case 9: *(int *)out = ord; break;
    case 11: case 19: *(CUdeviceptr *)out = m->base; break;
    case 12: case 18: *(size_t *)out = m->size; break;
    case 14: *(unsigned long long *)out = (unsigned long long)A[m->alloc].htypes; break;
    case 16: *(int *)out = cur() ? m->acc[cur()->dev] : 0; break;
    case 17: *(void **)out = NULL; break;
    default: return E_VALUE;
    }
    return OK;
}
FN(INIT, cuPointerGetAttribute, (void *out, CUpointer_attribute a, CUdeviceptr p), (out, a, p)) { return ptr_attr(out, (int)a, p); }
FN(INIT, cuPointerGetAttributes, (unsigned int n, CUpointer_attribute *a, void **out, CUdeviceptr p), (n, a, out, p)) {
    for (unsigned i = 0; i < n; i++) ptr_attr(out[i], (int)a[i], p);
    return OK;
}

/* ----------------------------------------------------------------- copies -- */
static int span(CUdeviceptr p, size_t n, int want) {     /* may the current device touch [p, p+n)? a refused access is sticky */
    for (uintptr_t q = p; n && q < p + n;) {
        Map *m = map_at(q); if (!m) return E_VALUE;
        if ((m->acc[cur()->dev] & want) != want) { cur()->sticky = E_ADDR; note("access refused"); return E_ADDR; }
        q = m->base + m->size;
    }
    return OK;
}
static void move(CUdeviceptr dev, void *host, size_t n, int to_dev) {
    while (n) {
        Map *m = map_at(dev); size_t o = dev - m->base, k = m->size - o < n ? m->size - o : n;
        if (to_dev) memcpy(m->shadow + o, host, k); else memcpy(host, m->shadow + o, k);
        dev += k; host = (char *)host + k; n -= k;
    }
}
static int htod(CUdeviceptr d, const void *s, size_t n) { int r = span(d, n, 3); if (!r) move(d, (void *)(uintptr_t)s, n, 1); note("%zu bytes", n); return r; }
static int dtoh(void *d, CUdeviceptr s, size_t n) { int r = span(s, n, 1); if (!r) move(s, d, n, 0); return r; }
static int dtod(CUdeviceptr d, CUdeviceptr s, size_t n) {
    int r = span(s, n, 1); if (!r) r = span(d, n, 3);
    if (r) return r;
    char *t = malloc(n ? n : 1); if (!t) return E_OOM;
    move(s, t, n, 0); move(d, t, n, 1); free(t); return OK;
}
static int uni(CUdeviceptr d, CUdeviceptr s, size_t n) {
    int a = map_at(d) != NULL, b = map_at(s) != NULL;
    if (a && b) return dtod(d, s, n);
    if (a) return htod(d, (void *)(uintptr_t)s, n);
    if (b) return dtoh((void *)(uintptr_t)d, s, n);
    memmove((void *)(uintptr_t)d, (void *)(uintptr_t)s, n); return OK;
}
static int fill(CUdeviceptr d, unsigned v, size_t w, size_t n) {
    if (d % w) return E_VALUE;
    int r = span(d, n * w, 3); if (r) return r;
    for (size_t i = 0; i < n;) {
        Map *m = map_at(d + i * w); size_t o = d + i * w - m->base, k = (m->size - o) / w; if (k > n - i) k = n - i;
        if (w == 1) memset(m->shadow + o, (int)v, k); else for (size_t j = 0; j < k; j++) memcpy(m->shadow + o + j * w, &v, w);
        i += k;
    }
    return OK;
}
static int st_ok(CUstream s) { return (uintptr_t)s <= 2 || s->magic == MAGIC_S; }
FN(CTX, cuMemcpyHtoD_v2, (CUdeviceptr d, const void *s, size_t n), (d, s, n)) { return htod(d, s, n); }
FN(CTX, cuMemcpyDtoH_v2, (void *d, CUdeviceptr s, size_t n), (d, s, n)) { return dtoh(d, s, n); }
FN(CTX, cuMemcpyDtoD_v2, (CUdeviceptr d, CUdeviceptr s, size_t n), (d, s, n)) { return dtod(d, s, n); }
FN(CTX, cuMemcpy, (CUdeviceptr d, CUdeviceptr s, size_t n), (d, s, n)) { return uni(d, s, n); }
FN(CTX, cuMemcpyHtoDAsync_v2, (CUdeviceptr d, const void *s, size_t n, CUstream t), (d, s, n, t)) { return st_ok(t) ? htod(d, s, n) : E_HANDLE; }
FN(CTX, cuMemcpyDtoHAsync_v2, (void *d, CUdeviceptr s, size_t n, CUstream t), (d, s, n, t)) { return st_ok(t) ? dtoh(d, s, n) : E_HANDLE; }
FN(CTX, cuMemcpyDtoDAsync_v2, (CUdeviceptr d, CUdeviceptr s, size_t n, CUstream t), (d, s, n, t)) { return st_ok(t) ? dtod(d, s, n) : E_HANDLE; }
FN(CTX, cuMemcpyAsync, (CUdeviceptr d, CUdeviceptr s, size_t n, CUstream t), (d, s, n, t)) { return st_ok(t) ? uni(d, s, n) : E_HANDLE; }
FN(CTX, cuMemsetD8_v2, (CUdeviceptr d, unsigned char v, size_t n), (d, v, n)) { return fill(d, v, 1, n); }
FN(CTX, cuMemsetD16_v2, (CUdeviceptr d, unsigned short v, size_t n), (d, v, n)) { return fill(d, v, 2, n); }
FN(CTX, cuMemsetD32_v2, (CUdeviceptr d, unsigned int v, size_t n), (d, v, n)) { return fill(d, v, 4, n); }
FN(CTX, cuMemsetD8Async, (CUdeviceptr d, unsigned char v, size_t n, CUstream t), (d, v, n, t)) { return st_ok(t) ? fill(d, v, 1, n) : E_HANDLE; }

/* ---------------------------------------------------- streams and events -- */
FN(CTX, cuStreamCreateWithPriority, (CUstream *s, unsigned int f, int prio), (s, f, prio)) {
    CUstream x = calloc(1, sizeof *x); if (!x) return E_OOM;
    *x = (struct CUstream_st){MAGIC_S, f, prio, cur(), nextid++ + 10}; nstream++; *s = x; return OK;
}
FN(CTX, cuStreamCreate, (CUstream *s, unsigned int f), (s, f)) { return cuStreamCreateWithPriority_impl(s, f, 0); }
FN(INIT, cuStreamDestroy_v2, (CUstream s), (s)) { if ((uintptr_t)s <= 2 || !st_ok(s)) return E_HANDLE; s->magic = 0; free(s); nstream--; return OK; }
FN(CTX, cuStreamSynchronize, (CUstream s), (s)) { return st_ok(s) ? OK : E_HANDLE; }
FN(CTX, cuStreamQuery, (CUstream s), (s)) { return st_ok(s) ? OK : E_HANDLE; }
FN(CTX, cuStreamGetFlags, (CUstream s, unsigned int *f), (s, f)) { *f = (uintptr_t)s <= 2 ? 0 : s->flags; return OK; }
FN(CTX, cuStreamGetPriority, (CUstream s, int *p), (s, p)) { *p = (uintptr_t)s <= 2 ? 0 : s->prio; return OK; }
FN(CTX, cuStreamGetId, (CUstream s, unsigned long long *i), (s, i)) { *i = (uintptr_t)s <= 2 ? (unsigned long long)(uintptr_t)s : s->id; return OK; }
FN(CTX, cuStreamGetCtx, (CUstream s, CUcontext *c), (s, c)) { *c = (uintptr_t)s <= 2 ? cur() : s->ctx; return OK; }
FN(CTX, cuStreamGetCtx_v2, (CUstream s, CUcontext *c, CUgreenCtx *g), (s, c, g)) { *c = (uintptr_t)s <= 2 ? cur() : s->ctx; if (g) *g = NULL; return OK; }
FN(CTX, cuStreamGetDevice, (CUstream s, CUdevice *d), (s, d)) { *d = ((uintptr_t)s <= 2 ? cur() : s->ctx)->dev; return OK; }
FN(CTX, cuStreamWaitEvent, (CUstream s, CUevent e, unsigned int f), (s, e, f)) { UNUSED(f); return st_ok(s) && e && e->magic == MAGIC_E ? OK : E_HANDLE; }
FN(CTX, cuStreamIsCapturing, (CUstream s, CUstreamCaptureStatus *c), (s, c)) { UNUSED(s); *(int *)c = 0; return OK; }
#define EV(e) do { if (!(e) || (e)->magic != MAGIC_E) return E_HANDLE; } while (0)
FN(CTX, cuEventCreate, (CUevent *e, unsigned int f), (e, f)) {
    CUevent x = calloc(1, sizeof *x); if (!x) return E_OOM;
    x->magic = MAGIC_E; x->flags = f; x->ctx = cur(); nevent++; *e = x; return OK;
}
FN(CTX, cuEventRecord, (CUevent e, CUstream s), (e, s)) { EV(e); if (!st_ok(s)) return E_HANDLE; clock_gettime(CLOCK_MONOTONIC, &e->t); e->recorded = 1; return OK; }
FN(CTX, cuEventRecordWithFlags, (CUevent e, CUstream s, unsigned int f), (e, s, f)) { UNUSED(f); return cuEventRecord_impl(e, s); }
FN(INIT, cuEventQuery, (CUevent e), (e)) { EV(e); return OK; }
FN(INIT, cuEventSynchronize, (CUevent e), (e)) { EV(e); return OK; }
FN(INIT, cuEventDestroy_v2, (CUevent e), (e)) { EV(e); e->magic = 0; free(e); nevent--; return OK; }
FN(INIT, cuEventElapsedTime_v2, (float *ms, CUevent a, CUevent b), (ms, a, b)) {
    EV(a); EV(b); if (!a->recorded || !b->recorded) return E_HANDLE;
    *ms = (float)((double)(b->t.tv_sec - a->t.tv_sec) * 1e3 + (double)(b->t.tv_nsec - a->t.tv_nsec) / 1e6); return OK;
}

/* ------------------------------------------------------- cuGetProcAddress -- */
#define F1(n, v) {#n, v, (void *)n}
#define F2(n, v) {#n, v, (void *)n##_v2}
EXPORT CUresult cuGetProcAddress_v2(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
static const struct { const char *name; int since; void *fn; } T[] = {
    F1(cuInit, 2000), F1(cuDriverGetVersion, 2020), F1(cuGetErrorName, 6000), F1(cuGetErrorString, 6000),
    {"cuGetProcAddress", 12000, (void *)cuGetProcAddress_v2},
    F1(cuDeviceGet, 2000), F1(cuDeviceGetCount, 2000), F1(cuDeviceGetName, 2000), F2(cuDeviceGetUuid, 9020), F2(cuDeviceTotalMem, 3020),
    F1(cuDeviceGetAttribute, 2000), F1(cuDeviceGetPCIBusId, 4010), F1(cuDeviceCanAccessPeer, 4000),
    F1(cuDevicePrimaryCtxRetain, 7000), F2(cuDevicePrimaryCtxRelease, 11000), F2(cuDevicePrimaryCtxReset, 11000),
    F2(cuDevicePrimaryCtxSetFlags, 11000), F1(cuDevicePrimaryCtxGetState, 7000),
    F1(cuCtxGetCurrent, 4000), F1(cuCtxSetCurrent, 4000), F2(cuCtxPushCurrent, 4000), F2(cuCtxPopCurrent, 4000),
    F1(cuCtxGetDevice, 2000), F2(cuCtxGetDevice, 13000), F1(cuCtxSynchronize, 2000), F2(cuCtxSynchronize, 13000), F1(cuCtxGetFlags, 7000),
    F1(cuCtxGetApiVersion, 3020), F1(cuCtxGetId, 12000), F1(cuCtxGetStreamPriorityRange, 5050),
    F1(cuMemGetAllocationGranularity, 10020), F1(cuMemCreate, 10020), F1(cuMemRelease, 10020), F1(cuMemExportToShareableHandle, 10020),
    F1(cuMemImportFromShareableHandle, 10020), F1(cuMemGetAllocationPropertiesFromHandle, 10020), F1(cuMemAddressReserve, 10020),
    F1(cuMemAddressFree, 10020), F1(cuMemMap, 10020), F1(cuMemUnmap, 10020), F1(cuMemSetAccess, 10020), F1(cuMemGetAccess, 10020),
    F1(cuMemRetainAllocationHandle, 11000), F2(cuMemGetAddressRange, 3020), F2(cuMemGetInfo, 3020),
    F1(cuPointerGetAttribute, 4000), F1(cuPointerGetAttributes, 7000),
    F2(cuMemcpyHtoD, 3020), F2(cuMemcpyDtoH, 3020), F2(cuMemcpyDtoD, 3020), F1(cuMemcpy, 4000), F2(cuMemcpyHtoDAsync, 3020),
    F2(cuMemcpyDtoHAsync, 3020), F2(cuMemcpyDtoDAsync, 3020), F1(cuMemcpyAsync, 4000),
    F2(cuMemsetD8, 3020), F2(cuMemsetD16, 3020), F2(cuMemsetD32, 3020), F1(cuMemsetD8Async, 3020),
    F1(cuStreamCreate, 2000), F1(cuStreamCreateWithPriority, 5050), F2(cuStreamDestroy, 4000), F1(cuStreamSynchronize, 2000), F1(cuStreamQuery, 2000),
    F1(cuStreamGetFlags, 5050), F1(cuStreamGetPriority, 5050), F1(cuStreamGetId, 12000), F1(cuStreamGetCtx, 9020), F2(cuStreamGetCtx, 12050),
    F1(cuStreamGetDevice, 12080), F1(cuStreamWaitEvent, 3020), F1(cuStreamIsCapturing, 10000),
    F1(cuEventCreate, 2000), F1(cuEventRecord, 2000), F1(cuEventRecordWithFlags, 11010), F1(cuEventQuery, 2000), F1(cuEventSynchronize, 2000),
    F2(cuEventDestroy, 4000), F2(cuEventElapsedTime, 12080)};
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **fn, int ver, cuuint64_t flags, CUdriverProcAddressQueryResult *st) {
    UNUSED(flags); pthread_once(&once, setup);
    int best = -1, known = 0;
    for (size_t i = 0; i < sizeof T / sizeof *T; i++) {
        if (strcmp(T[i].name, name)) continue;
        known = 1;
        if (T[i].since <= ver && T[i].since <= version && (best < 0 || T[i].since > T[best].since)) best = (int)i;
    }
    *fn = best < 0 ? NULL : T[best].fn;
    if (st) *(int *)st = best >= 0 ? 0 : known ? 2 : 1;
    if (best < 0 && proclog[0]) { FILE *f = fopen(proclog, "a"); if (f) { fprintf(f, "%s %d\n", name, ver); fclose(f); } }
    return (CUresult)(best < 0 ? E_NOTFOUND : OK);
}

/* --------------------------------------------- for the tests, via ctypes -- */
EXPORT int fakecuda_version(void) { return 1; }
EXPORT void fakecuda_set_fail(const char *spec) { pthread_once(&once, setup); pthread_mutex_lock(&mu); parse_faults(spec); pthread_mutex_unlock(&mu); }
EXPORT long fakecuda_seen(int fault) {                    /* how often the call of a FAKECUDA_FAIL item was made since it was set */
    pthread_mutex_lock(&mu); long n = fault >= 0 && fault < nF ? F[fault].seen : -1; pthread_mutex_unlock(&mu); return n;
}
EXPORT void fakecuda_stats(unsigned long long out[8]) {   /* handles, physical, reservations, mappings, mapped bytes, streams, events, primary refs */
    pthread_once(&once, setup); pthread_mutex_lock(&mu); memset(out, 0, 64);
    for (int i = 0; i < nA; i++) { if (A[i].fd >= 0) out[1]++; if (A[i].fd >= 0 && A[i].href > 0) out[0] += (unsigned long long)A[i].href; }
    out[2] = (unsigned long long)nR; out[3] = (unsigned long long)nM; for (int i = 0; i < nM; i++) out[4] += M[i].size;
    out[5] = (unsigned long long)nstream; out[6] = (unsigned long long)nevent;
    for (int i = 0; i < MAXDEV; i++) out[7] += (unsigned long long)primary[i].refs;
    pthread_mutex_unlock(&mu);
}
EXPORT unsigned long long fakecuda_used(int phys) { pthread_once(&once, setup); return used_bytes(phys); }
