// Paged KV to codes and back: what all parts share. The parts are put together in the order of SOURCES in cuda_codec.py
// and compiled by NVRTC for one head size, codec and cache dtype.
//
// What comes from Python, ahead of this text, as macros: THREADS and CODE_THREADS (of blocks of threads), ENCODE_BLOCKS,
// DECODE_BLOCKS and AHEAD (Occupancy), HEAD_DIM, KEY_BITS, VALUE_BITS, ROTATED, UNBIASED (the
// scale), DTYPE (0 bf16, 1 fp16, 2 fp32, 3 fp8 e4m3, 4 fp8 e5m2), ALIGNED (vectors begin at multiples of 16 bytes), FAST (tile.cu is of use),
// WHOLE (heads have whole tiles). As constants, floats as their bits: ROOT; LARGEST; WEIGHTS[HEAD_DIM]; SIGNS (bit
// i % 32 of word i / 32: element i changes sign); RMS and BLOCK_ROOT, the roots of the largest Hadamard block over HEAD_DIM
// and of 1 over it; ROOTS[HEAD_DIM / 16] of 1 over an element's block; BLOCK_SIZE_OF[HEAD_DIM], the size of an element's Hadamard block;
// LEVELS_b and CUTS_b of b bits; HALVES_b: the levels as the sum of two fp16, their low bytes, then their high bytes, as
// tables for prmt.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL 0xffffffffu
#define EXPONENT 0x7f800000u
#define TILE 8
#define WARPS (THREADS / 32)
#define CODE_WARPS (CODE_THREADS / 32)  // of a block of threads that encodes or decodes
#define SPREAD_WARP (threadIdx.x / 32 * gridDim.x + blockIdx.x)  // the first go to as many processors as there are

struct Job {  // sections of n blocks of one form
    const u64* caches;     // [layers] addresses
    const i64* block_ids;  // [n]
    const i64* offsets;    // [n] multiples of 16: block i is at codes + offsets[i]
    u8* codes;
    const u8* headers;     // [n, head_nbytes]
    int* status;           // [n]
    const i64* sizes;      // [n] bytes of each block, where they differ; else null
    i64 nbytes, head_nbytes;        // of a block, and of its header with the entries
    i64 block_stride;               // in elements, as the next three; within a block they fit an int
    i64 at[2];                      // first key and first value of the sections in a paged block
    i64 payload[2];                 // where keys and values begin in an encoded block, in bytes
    i64 ends[4];                    // of scales and planes; up to the next multiple of 16 there are zeros
    int head_stride, token_stride;  // in elements
    int n, layers, heads, tokens;   // tokens: of the sections
    int kinds, vector_nbytes;       // of sections that stay as they are: 1 where they have no values; bytes of a vector
};

#define GOOD 0x7fffffff
#define BAD_CHECKSUM -1
#define BAD_HEADER -2  // minus the offset of the first byte that differs

// Not reckoned again where it is used.
__device__ __forceinline__ void pin(u32& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ float f(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 b(float x) { return __float_as_uint(x); }
template <int BITS>
__device__ __forceinline__ float level(int k) { return f(BITS == 2 ? LEVELS_2[k] : BITS == 3 ? LEVELS_3[k] : LEVELS_4[k]); }
template <int BITS>
__device__ __forceinline__ float cut_at(int k) { return f(BITS == 2 ? CUTS_2[k] : BITS == 3 ? CUTS_3[k] : CUTS_4[k]); }
__device__ __forceinline__ u32 bf16_bits(u32 bits) { return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16; }

#if DTYPE == 2
typedef u32 Word;
__device__ __forceinline__ float load(const Word* x) { return f(*x); }
__device__ __forceinline__ Word store(float x) { return b(x); }
#elif DTYPE == 1
typedef u16 Word;
__device__ __forceinline__ float load(const Word* x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(*x)); return y; }
__device__ __forceinline__ Word store(float x) {
    Word y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(fminf(fmaxf(x, -65504.f), 65504.f)));
    return y;
}
#elif DTYPE == 0
typedef u16 Word;
__device__ __forceinline__ float load(const Word* x) { return f((u32)*x << 16); }
__device__ __forceinline__ Word store(float x) { return (Word)bf16_bits(b(x)); }
#else
typedef u8 Word;
#define FP8_BITS (DTYPE == 3 ? 3 : 2)           // of the fraction
#define FP8_LEAST (DTYPE == 3 ? 121u : 113u)    // float32's exponent of the smallest number that has all its digits
#define FP8_LARGEST (DTYPE == 3 ? 448.f : 57344.f)
#define FP8_END (DTYPE == 3 ? 0x7fu : 0x7cu)    // without the sign: the first that is not finite
__device__ __forceinline__ float load(const Word* x) {
    const u32 size = *x & 0x7fu;
    // what is denormal here is so as float32, and the product normal
    float y = __fmul_rn(f(size << (23 - FP8_BITS)), f(126u + FP8_LEAST << 23));
    if (size >= FP8_END) y = f(EXPONENT | (DTYPE == 3 ? 1u : size & 3u) << 21);
    return f(b(y) | (*x & 0x80u) << 24);
}
__device__ __forceinline__ Word store(float x) {  // finite
    const float size = fminf(fabsf(x), FP8_LARGEST);
    const u32 exponent = max(b(size) >> 23, FP8_LEAST);
    const u32 whole = __float2uint_rn(__fmul_rn(size, f((254u - (exponent - FP8_BITS)) << 23)));
    return (Word)(((exponent - FP8_LEAST) << FP8_BITS) + whole | b(x) >> 31 << 7);
}
#endif
