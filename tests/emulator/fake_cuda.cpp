// A stand-in for libcuda.so.1 and libcublasLt.so.13 without a GPU, for tests: the functions that
// csrc/cuda calls, over the emulator. A stream is a thread that works off a queue, so what is not
// ordered by an event runs in any order; device memory starts with garbage; a copy outside of what
// was allocated is an error. Products are plain loops.
//   FAKE_CUDA_MEMORY    bytes of the GPU (default 16 GiB)
//   FAKE_CUDA_DEVICES   how many GPUs (1)
//   FAKE_CUDA_REGISTER_MAX  bytes of host memory that can be pinned at a time
//   FAKE_CUDA_JITTER    seed of random sleeps before each command of a stream
#include <cublasLt.h>
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"

#define API extern "C" __attribute__((visibility("default")))

static double number(const char *name, double fallback)
{
    const char *text = getenv(name);
    return text && *text ? atof(text) : fallback;
}

// ---- streams and events ----

struct CUevent_st {
    std::mutex lock;
    std::condition_variable changed;
    uint64_t recorded = 0, done = 0;
    std::chrono::steady_clock::time_point when;
};

struct CUstream_st {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool stop = false;
    std::atomic<uint64_t> pending{0};
    uint32_t random = (uint32_t)number("FAKE_CUDA_JITTER", 0);
    std::thread thread{[this] { work(); }};

    void work()
    {
        for (;;) {
            std::unique_lock<std::mutex> hold(lock);
            changed.wait(hold, [this] { return stop || !queue.empty(); });
            if (queue.empty())
                return;
            std::function<void()> job = std::move(queue.front());
            queue.pop_front();
            hold.unlock();
            if (random) {
                random = random * 1664525u + 1013904223u;
                std::this_thread::sleep_for(std::chrono::microseconds(random >> 16 & 1023));
            }
            job();
            pending--;
        }
    }
    void push(std::function<void()> job)
    {
        pending++;
        std::lock_guard<std::mutex> hold(lock);
        queue.push_back(std::move(job));
        changed.notify_one();
    }
    ~CUstream_st()
    {
        {
            std::lock_guard<std::mutex> hold(lock);
            stop = true;
            changed.notify_one();
        }
        thread.join();
    }
};

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned, int)
{
    *stream = new CUstream_st;
    return CUDA_SUCCESS;
}
API CUresult cuStreamDestroy_v2(CUstream stream)
{
    delete stream;
    return CUDA_SUCCESS;
}
API CUresult cuStreamQuery(CUstream stream)
{
    return stream->pending ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned)
{
    uint64_t want;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        want = event->recorded;
    }
    stream->push([event, want] {
        std::unique_lock<std::mutex> hold(event->lock);
        event->changed.wait(hold, [&] { return event->done >= want; });
    });
    return CUDA_SUCCESS;
}
API CUresult cuEventCreate(CUevent *event, unsigned)
{
    *event = new CUevent_st;
    return CUDA_SUCCESS;
}
API CUresult cuEventDestroy_v2(CUevent event)
{
    delete event;
    return CUDA_SUCCESS;
}
API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    uint64_t number;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        number = ++event->recorded;
    }
    stream->push([event, number] {
        std::lock_guard<std::mutex> hold(event->lock);
        event->when = std::chrono::steady_clock::now();
        event->done = event->done > number ? event->done : number;
        event->changed.notify_all();
    });
    return CUDA_SUCCESS;
}
API CUresult cuEventQuery(CUevent event)
{
    std::lock_guard<std::mutex> hold(event->lock);
    return event->done >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
    *ms = std::chrono::duration<float, std::milli>(to->when - from->when).count();
    return CUDA_SUCCESS;
}
// ---- memory ----

static std::mutex memory_lock;
static std::map<uintptr_t, size_t> memory, registered;
static size_t taken;

static size_t capacity()
{
    return (size_t)number("FAKE_CUDA_MEMORY", 16.0 * (1ull << 30));
}

static bool inside(CUdeviceptr p, size_t bytes)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto after = memory.upper_bound((uintptr_t)p);
    if (after == memory.begin())
        return false;
    --after;
    return (uintptr_t)p + bytes <= after->first + after->second;
}

API CUresult cuMemGetInfo_v2(size_t *left, size_t *all)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    *all = capacity();
    *left = *all - taken;
    return CUDA_SUCCESS;
}
API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t bytes)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > capacity() - taken)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *room = nullptr;
    if (posix_memalign(&room, 512, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(room, 0xa5, bytes < (64u << 20) ? bytes : 64u << 20);
    memory[(uintptr_t)room] = bytes;
    taken += bytes;
    *p = (CUdeviceptr)(uintptr_t)room;
    return CUDA_SUCCESS;
}
API CUresult cuMemFree_v2(CUdeviceptr p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = memory.find((uintptr_t)p);
    if (found == memory.end())
        return CUDA_ERROR_INVALID_VALUE;
    taken -= found->second;
    memory.erase(found);
    free((void *)(uintptr_t)p);
    return CUDA_SUCCESS;
}
API CUresult cuMemHostRegister_v2(void *host, size_t bytes, unsigned)
{
    if ((double)bytes > number("FAKE_CUDA_REGISTER_MAX", 1e18))
        return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> hold(memory_lock);
    uintptr_t first = (uintptr_t)host / 4096, end = ((uintptr_t)host + bytes + 4095) / 4096;
    for (auto &one : registered)
        if (first < (one.first + one.second + 4095) / 4096 && one.first / 4096 < end)
            return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    registered[(uintptr_t)host] = bytes;
    return CUDA_SUCCESS;
}
API CUresult cuMemHostUnregister(void *host)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    return registered.erase((uintptr_t)host) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
static CUresult copy(void *to, const void *from, size_t bytes, CUstream stream)
{
    stream->push([=] { memcpy(to, from, bytes); });
    return CUDA_SUCCESS;
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    return inside(to, bytes) ? copy((void *)(uintptr_t)to, from, bytes, stream)
                             : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return inside(from, bytes) ? copy(to, (const void *)(uintptr_t)from, bytes, stream)
                               : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return inside(to, bytes) && inside(from, bytes)
               ? copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, stream)
               : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char value, size_t bytes, CUstream stream)
{
    if (!inside(p, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    stream->push([=] { memset((void *)(uintptr_t)p, value, bytes); });
    return CUDA_SUCCESS;
}

// ---- device and kernels ----

API CUresult cuInit(unsigned)
{
    return CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char **text)
{
    static thread_local std::string name;
    name = "error " + std::to_string((int)error);
    *text = name.c_str();
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the emulator";
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int *count)
{
    *count = (int)number("FAKE_CUDA_DEVICES", 1);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice *device, int index)
{
    *device = index;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char *name, int size, CUdevice)
{
    snprintf(name, (size_t)size, "emulated GPU");
    return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice)
{
    *bytes = capacity();
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice)
{
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 4;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = 99 * 1024;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device)
{
    snprintf(id, (size_t)size, "ffff:%02x:00.0", (unsigned)device);
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice)
{
    return CUDA_SUCCESS;
}
static thread_local CUcontext current;
API CUresult cuCtxSetCurrent(CUcontext context)
{
    current = context;
    return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    *module = (CUmodule)(uintptr_t)image;
    return image ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
API CUresult cuModuleUnload(CUmodule)
{
    return CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name)
{
    for (const emu::entry *e = emu::entries; e->name; e++)
        if (!strcmp(e->name, name)) {
            *function = (CUfunction)(uintptr_t)e;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute, CUfunction)
{
    *value = 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int)
{
    return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, CUstream stream, void **args,
                            void **)
{
    const emu::entry *e = (const emu::entry *)(uintptr_t)function;
    if (!current)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || bx * by * bz > 1024 ||
        shared > 99 * 1024)
        return CUDA_ERROR_INVALID_VALUE;
    std::vector<unsigned char> copy((unsigned char *)args[0], (unsigned char *)args[0] + e->bytes);
    stream->push([=] {
        alignas(64) unsigned char pod[4096];
        memcpy(pod, copy.data(), copy.size());
        const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
        emu::launch(grid, block, shared, e->run, pod);
    });
    return CUDA_SUCCESS;
}

// ---- cuBLASLt ----

struct product { // a cublasLtMatmulDesc_t
    cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void *bias = nullptr;
    cudaDataType_t bias_type = CUDA_R_32F;
};

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct matrix { // a cublasLtMatrixLayout_t
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
    float get(const void *p, uint64_t row, uint64_t col) const
    {
        uint64_t at = col * (uint64_t)ld + row;
        if (type == CUDA_R_32F)
            return ((const float *)p)[at];
        return from_bits((uint32_t)((const uint16_t *)p)[at] << 16);
    }
    void put(void *p, uint64_t row, uint64_t col, float x) const
    {
        uint64_t at = col * (uint64_t)ld + row;
        if (type == CUDA_R_32F) {
            ((float *)p)[at] = x;
            return;
        }
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        ((uint16_t *)p)[at] = (uint16_t)(nan ? bits >> 16 | 0x40
                                             : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
};

API size_t cublasLtGetVersion(void)
{
    return 130000;
}
API const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status ? "an error of the emulator" : "success";
}
API cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = (cublasLtHandle_t)(uintptr_t)1;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtDestroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t,
                                            cudaDataType_t)
{
    *desc = (cublasLtMatmulDesc_t) new product;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete (product *)desc;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                  cublasLtMatmulDescAttributes_t which,
                                                  const void *value, size_t bytes)
{
    product *p = (product *)desc;
    void *to = which == CUBLASLT_MATMUL_DESC_TRANSA         ? (void *)&p->a
               : which == CUBLASLT_MATMUL_DESC_TRANSB       ? (void *)&p->b
               : which == CUBLASLT_MATMUL_DESC_EPILOGUE     ? (void *)&p->epilogue
               : which == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? (void *)&p->bias
               : which == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE
                   ? (void *)&p->bias_type
                   : nullptr;
    if (!to)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                              uint64_t rows, uint64_t cols, int64_t ld)
{
    *layout = (cublasLtMatrixLayout_t) new matrix{type, rows, cols, ld};
    return ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete (matrix *)layout;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = (cublasLtMatmulPreference_t) new int(0);
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete (int *)preference;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                        cublasLtMatmulPreferenceAttributes_t,
                                                        const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatmulPreference_t, int,
                                                  cublasLtMatmulHeuristicResult_t result[],
                                                  int *found)
{
    // Two, so that the choice between them is tried.
    memset(result, 0, 2 * sizeof *result);
    *found = 2;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha,
                                  const void *A, cublasLtMatrixLayout_t la, const void *B,
                                  cublasLtMatrixLayout_t lb, const void *beta, const void *C,
                                  cublasLtMatrixLayout_t lc, void *D, cublasLtMatrixLayout_t ld,
                                  const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream)
{
    product p = *(product *)desc;
    matrix a = *(matrix *)la, b = *(matrix *)lb, c = *(matrix *)lc, d = *(matrix *)ld;
    float x = *(const float *)alpha, y = *(const float *)beta;
    uint64_t m = p.a == CUBLAS_OP_N ? a.rows : a.cols, k = p.a == CUBLAS_OP_N ? a.cols : a.rows;
    uint64_t n = p.b == CUBLAS_OP_N ? b.cols : b.rows, k2 = p.b == CUBLAS_OP_N ? b.rows : b.cols;
    if (k != k2 || d.rows != m || d.cols != n || a.type != b.type || c.type != d.type)
        return CUBLAS_STATUS_INVALID_VALUE;
    ((CUstream)stream)->push([=] {
        std::vector<float> left(m * k), right(k * n), out(m * n);
        for (uint64_t j = 0; j < k; j++)
            for (uint64_t i = 0; i < m; i++)
                left[j * m + i] = p.a == CUBLAS_OP_N ? a.get(A, i, j) : a.get(A, j, i);
        for (uint64_t j = 0; j < n; j++)
            for (uint64_t i = 0; i < k; i++)
                right[j * k + i] = p.b == CUBLAS_OP_N ? b.get(B, i, j) : b.get(B, j, i);
        for (uint64_t j = 0; j < n; j++)
            for (uint64_t l = 0; l < k; l++) {
                float f = right[j * k + l];
                float *o = &out[j * m];
                const float *from = &left[l * m];
                for (uint64_t i = 0; i < m; i++)
                    o[i] += f * from[i];
            }
        matrix bias{p.bias_type, m, 1, (int64_t)m};
        for (uint64_t j = 0; j < n; j++)
            for (uint64_t i = 0; i < m; i++) {
                float sum = x * out[j * m + i];
                if (y)
                    sum += y * c.get(C, i, j);
                if (p.epilogue == CUBLASLT_EPILOGUE_BIAS)
                    sum += bias.get(p.bias, i, 0);
                d.put(D, i, j, sum);
            }
    });
    return CUBLAS_STATUS_SUCCESS;
}
