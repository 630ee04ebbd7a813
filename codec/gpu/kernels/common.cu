// Paged KV to encoded blocks and back: what all kernels share. The files of a codec are joined in the order of its
// SOURCES, and compiled by NVRTC for one head size and cache dtype. A section is a part of an encoded block.
//
// Macros from Python, ahead of this text: THREADS (in a thread block), HEAD_DIM, DTYPE (0 bf16, 1 fp16, 2 fp32, 3 e4m3,
// 4 e5m2), ALIGNED (1 if vectors begin at multiples of 16 bytes); as bits of floats, ROOT (HEAD_DIM**-0.5) and LARGEST
// (of bf16). Constant arrays: WEIGHTS[HEAD_DIM] of the rotation, as bits of floats; BLOCK_SIZE_OF[HEAD_DIM], the size of
// an element's Hadamard block. wht and klt also use PAIRS, INTERLEAVED (RoPE), SCALES (a latent scale's bytes, or 0).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL 0xffffffffu
#define EXPONENT 0x7f800000u
#define WARPS (THREADS / 32)
#define SPREAD_WARP (threadIdx.x / 32 * gridDim.x + blockIdx.x)  // consecutive numbers are in different thread blocks

struct Blocks {  // n KV blocks with the same layout; the arguments of all kernels begin with it
    const u64* caches;     // [layers] addresses
    const i64* block_ids;  // [n]
    const i64* offsets;    // [n] multiples of 16: encoded block i is at buffer + offsets[i]
    u8* buffer;
    const u8* headers;     // [n, head_nbytes], where each section has its largest size
    int* status;           // [n]
    i64* nbytes;           // [n] size of each encoded block
    i64 head_nbytes;                // of the header with the entries
    i64 block_stride;               // in elements, as `at`
    i64 at[2];                      // first key and first value of the sections in a paged block
    int head_stride, token_stride;  // in elements; offsets within a paged block fit an int
    int n, layers, heads, tokens;   // tokens: of a KV block in the sections
};

struct Job : Blocks {  // sections that are encoded at a fixed rate
    i64 payload[2];            // where keys and values begin in an encoded block, in bytes
    i64 ends[4];               // of arrays in an encoded block, in bytes; zeros follow up to a multiple of 16
    int kinds, vector_nbytes;  // kinds: 2 for keys and values, else 1; vector_nbytes: of a paged vector
};

#define GOOD 0x7fffffff
#define BAD_CHECKSUM -1
#define BAD_HEADER -2  // the status is BAD_HEADER minus the offset of the first byte that differs

// Keep x in a register, so that the compiler does not compute it again at each use.
__device__ __forceinline__ void pin(u32& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ float f(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 b(float x) { return __float_as_uint(x); }
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
#define FP8_LEAST (DTYPE == 3 ? 121u : 113u)    // float32's exponent bits of the smallest normal number
#define FP8_LARGEST (DTYPE == 3 ? 448.f : 57344.f)
#define FP8_END (DTYPE == 3 ? 0x7fu : 0x7cu)    // bits of the first number that is not finite, without the sign
__device__ __forceinline__ float load(const Word* x) {
    const u32 size = *x & 0x7fu;
    // a denormal fp8 number is a denormal float32 here, and the product is normal
    float y = __fmul_rn(f(size << (23 - FP8_BITS)), f(126u + FP8_LEAST << 23));
    if (size >= FP8_END) y = f(EXPONENT | (DTYPE == 3 ? 1u : size & 3u) << 21);
    return f(b(y) | (*x & 0x80u) << 24);
}
__device__ __forceinline__ Word store(float x) {  // x is finite
    const float size = fminf(fabsf(x), FP8_LARGEST);
    const u32 exponent = max(b(size) >> 23, FP8_LEAST);
    const u32 whole = __float2uint_rn(__fmul_rn(size, f((254u - (exponent - FP8_BITS)) << 23)));
    return (Word)(((exponent - FP8_LEAST) << FP8_BITS) + whole | b(x) >> 31 << 7);
}
#endif
