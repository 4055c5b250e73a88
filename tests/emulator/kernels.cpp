// The table of the kernels by which fake_cuda.cpp calls them. The kernels themselves are
// csrc/cuda/kernels/*.cu, compiled as C++ with SLIDE_EMULATE.
#include "cuda/flash_args.h"
#include "device/kernel_args.h"
#include "fake_cuda.h"

#define X(symbol, args) extern "C" void symbol(args);
#include "cuda/entries.def"
#undef X

#define X(symbol, args)                                                                            \
    {#symbol, [](const void *a) { symbol(*(const args *)a); }, sizeof(args)},
const emu::entry emu::entries[] = {
#include "cuda/entries.def"
    {nullptr, nullptr, 0}};
