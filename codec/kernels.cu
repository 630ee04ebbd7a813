// Paged KV to codes and back. Compiled by NVRTC for one head size, codec and cache dtype; see paged_cuda.py.
//
// What comes from Python, ahead of this text, as macros: HEAD_DIM, KEY_BITS, VALUE_BITS, ROTATED, DTYPE (0 bf16, 1 fp16,
// 2 fp32), FAST, WHOLE (heads have whole tiles); and as constants, floats as their bits: ROOT; LARGEST; WEIGHTS[HEAD_DIM]; SIGNS (bit i % 32 of word
// i / 32: element i changes sign); BLOCK_SIZE_OF[HEAD_DIM], the size of an element's Hadamard block; LEVELS_b and CUTS_b of
// b bits; HALVES_b: the levels as the sum of two fp16, their low bytes, then their high bytes, as tables for prmt.
//
// A warp works on tiles of 8 vectors (tokens of one head). The order of all float operations in encode_vector and
// decode_vector is that of manthan.codec.base, bit for bit. The fast paths do the same sums on the tensor cores:
// H(16 n) = H(16) x H(n), the first factor by mma.m16n8k16 over 8 vectors at a time, the second by butterflies between
// accumulators of one thread. The inputs of those products are exact in 16 bits (a bf16 or fp16 vector, +-1; or a level
// as the sum of two fp16), and the sums are float32, so only the order of additions differs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL 0xffffffffu
#define EXPONENT 0x7f800000u
#define TILE 8

struct Job {
    const u64* caches;     // [layers] addresses
    const i64* block_ids;  // [n]
    const i64* slots;      // [n]
    u8* codes;             // slot i is at codes + i * slot_stride
    const u8* headers;     // [n, 160]
    int* status;           // [n]
    i64 slot_stride, nbytes;
    i64 block_stride;               // in elements, as the next three; within a block they fit an int
    i64 at[2];                      // first key and first value of a block
    i64 payload[2];                 // key codes and value codes of an encoded block, in bytes
    int head_stride, token_stride;  // in elements
    int n, layers, heads, tokens;
    int kinds, first_kind;  // keys are kind 0, values kind 1
};

#define GOOD 0x7fffffff
#define BAD_CHECKSUM -1
#define BAD_HEADER -2  // minus the offset of the first byte that differs

__device__ __forceinline__ float f(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 b(float x) { return __float_as_uint(x); }
template <int BITS>
__device__ __forceinline__ float level(int k) { return f(BITS == 3 ? LEVELS_3[k] : LEVELS_4[k]); }
template <int BITS>
__device__ __forceinline__ float cut_at(int k) { return f(BITS == 3 ? CUTS_3[k] : CUTS_4[k]); }
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
#else
typedef u16 Word;
__device__ __forceinline__ float load(const Word* x) { return f((u32)*x << 16); }
__device__ __forceinline__ Word store(float x) { return (Word)bf16_bits(b(x)); }
#endif

// ---- one vector by one warp, in the exact order ------------------------------------------------------------------------

#define ROWS ((HEAD_DIM + 31) / 32)  // element 32 r + lane is in v[r]

__device__ __forceinline__ void hadamard(float (&v)[ROWS], int lane) {
    if (!ROTATED) return;
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float other = __shfl_xor_sync(FULL, v[r], stride);
            int i = 32 * r + lane;
            if (i < HEAD_DIM && BLOCK_SIZE_OF[i] > stride)
                v[r] = lane & stride ? __fsub_rn(other, v[r]) : __fadd_rn(v[r], other);
        }
    }
#pragma unroll
    for (int stride = 1; stride < ROWS; stride *= 2) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!(r & stride) && (r | stride) < ROWS && BLOCK_SIZE_OF[32 * r] > 32 * stride) {
                float low = v[r], high = v[r | stride];
                v[r] = __fadd_rn(low, high);
                v[r | stride] = __fsub_rn(low, high);
            }
        }
    }
}

__device__ __forceinline__ float fold(const float (&v)[ROWS], int lane, float* sums) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float x = v[r];
        x = __fadd_rn(x, __shfl_down_sync(FULL, x, 4, 8));
        x = __fadd_rn(x, __shfl_down_sync(FULL, x, 2, 8));
        x = __fadd_rn(x, __shfl_down_sync(FULL, x, 1, 8));
        if (lane % 8 == 0 && 32 * r + lane < HEAD_DIM) sums[4 * r + lane / 8] = x;
    }
    __syncwarp();
    for (int n = HEAD_DIM / 8; n > 1; n = (n + 1) / 2) {
        int half = (n + 1) / 2;
        if (lane < n - half) sums[lane] = __fadd_rn(sums[lane], sums[half + lane]);
        __syncwarp();
    }
    float total = sums[0];
    __syncwarp();
    return total;
}

// Returns whether the vector is finite; of one that is not, nothing is written.
template <int BITS>
__device__ __noinline__ bool encode_vector(const Word* x, u8* scale, u8* planes, int lane, float* sums) {
    const int levels = 1 << (BITS - 1);
    float v[ROWS], q[ROWS], t[ROWS];
    u32 top = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        v[r] = i < HEAD_DIM ? load(x + i) : 0.f;
        top = max(top, b(v[r]) & 0x7fffffffu);
    }
    top = __reduce_max_sync(FULL, top);
    if (top >= EXPONENT) return false;
    u32 field = (u32)max(254 - (int)(top >> 23), 8);
    float factor = f(field << 23), inverse = field < 254 ? f((254 - field) << 23) : f(1u << 22);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        v[r] = i < HEAD_DIM ? __fmul_rn(__fmul_rn(v[r], factor), f(WEIGHTS[i])) : 0.f;
    }
    hadamard(v, lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) t[r] = __fmul_rn(v[r], v[r]);
    float rms = __fmul_rn(__fsqrt_rn(fold(t, lane, sums)), f(ROOT));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        bool minus = v[r] < 0.f;
        v[r] = fabsf(v[r]);
        int k = 0;
        q[r] = level<BITS>(0);
#pragma unroll
        for (int c = 1; c < levels; c++)
            if (v[r] > __fmul_rn(cut_at<BITS>(c - 1), rms)) {
                k = c;
                q[r] = level<BITS>(c);
            }
        int code = k | (minus ? levels : 0);
#pragma unroll
        for (int p = 0; p < BITS; p++) {
            u32 word = __ballot_sync(FULL, code >> (BITS - 1 - p) & 1);
            if (lane < 4 && 4 * r + lane < HEAD_DIM / 8) planes[p * (HEAD_DIM / 8) + 4 * r + lane] = word >> (8 * lane);
        }
        t[r] = __fmul_rn(v[r], q[r]);
        q[r] = __fmul_rn(q[r], q[r]);
    }
    float dot = fold(t, lane, sums), square = fold(q, lane, sums);
    u32 rounded = min(bf16_bits(b(__fmul_rn(__fdiv_rn(dot, square), inverse))), 0x7f7fu);
    if (lane < 2) scale[lane] = rounded >> (8 * lane);
    return true;
}

// Returns whether the scale is finite; with one that is not, nothing is written.
template <int BITS>
__device__ __noinline__ bool decode_vector(const u8* scale, const u8* planes, Word* x, int lane) {
    const int levels = 1 << (BITS - 1);
    u32 bits = (u32)scale[0] << 16 | (u32)scale[1] << 24;
    if ((bits & EXPONENT) == EXPONENT) return false;
    float v[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane, code = 0;
        v[r] = 0.f;
        if (i < HEAD_DIM) {
#pragma unroll
            for (int p = 0; p < BITS; p++) code = code << 1 | (planes[p * (HEAD_DIM / 8) + i / 8] >> (i % 8) & 1);
            float magnitude = level<BITS>(code & (levels - 1));
            v[r] = code & levels ? -magnitude : magnitude;
        }
    }
    hadamard(v, lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        if (i < HEAD_DIM) {
            float y = __fmul_rn(__fmul_rn(v[r], f(WEIGHTS[i])), f(bits));
            x[i] = store(__fadd_rn(fminf(fmaxf(y, -f(LARGEST)), f(LARGEST)), 0.f));  // adding 0 leaves no -0
        }
    }
    return true;
}

// ---- tiles of 8 vectors on the tensor cores ----------------------------------------------------------------------------

#if FAST
// Thread 4 g + t holds of B, the 16 x 8 operand whose columns are vectors: rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1)
// of column g; and of the product: rows g (c0, c1) and g + 8 (c2, c3) of columns 2t and 2t + 1.

#define CHUNKS (HEAD_DIM / 16)  // the n of H(16 n)
#define RUN (HEAD_DIM / 8)      // elements, or bits of a plane, that are next to each other in one thread

#if DTYPE == 1
#define ONE 0x3c00u
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define MMA_K8 "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
#else
#define ONE 0x3f80u
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define MMA_K8 "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
#endif
#define MMA_F16 "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"

#define PRODUCT(OP, c, a, b0, b1)                                                                                    \
    asm volatile(OP " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                         \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

#define PRODUCT_K8(c, a0, a1, b0)                                                                                    \
    asm volatile(MMA_K8 " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                              \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                    \
                 : "r"(a0), "r"(a1), "r"(b0))

// A pair of +-1 in 16 bits: the sign of the first, and whether the second differs from it.
__device__ __forceinline__ u32 ones(u32 one, int minus, int differ) {
    return one * 0x10001u ^ (minus & 1 ? 0x80008000u : 0u) ^ (differ ? 0x80000000u : 0u);
}

// The factor H(n), between a thread's accumulators.
__device__ __forceinline__ void butterflies(float (&c)[CHUNKS][4]) {
#pragma unroll
    for (int stride = 1; stride < CHUNKS; stride *= 2)
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            if (!(j & stride))
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float low = c[j][k], high = c[j | stride][k];
                    c[j][k] = low + high;
                    c[j | stride][k] = low - high;
                }
}

// Of two numbers of this thread, one is kept, and the other added to what the thread `mask` away keeps of it.
__device__ __forceinline__ float halve(float zero, float one, int mask, int lane) {
    bool keeps_one = lane & mask;
    return (keeps_one ? one : zero) + __shfl_xor_sync(FULL, keeps_one ? zero : one, mask);
}

// Element e of a vector: bit 0 is row bit 0 of B, the bits above it the chunk, the three highest rows' bits t and 3.
// Row g + 8 i of chunk j's product is element RUN g + 2 j + i of the transformed vector.
struct Encoder {
    u32 a[4], flip[2][CHUNKS];

    __device__ __forceinline__ Encoder(int lane) {
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; i++) a[i] = ones(ONE, __popc(g & (t + 4 * (i >> 1))), i & 1);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                int e = RUN * (t + 4 * k) + 2 * j;
                u32 two = SIGNS[e / 32] >> (e % 32);
                flip[k][j] = (two & 1) << 15 | (two & 2) << 30;
            }
    }
};

struct Piece {  // a thread's share of its vector: two runs
    u32 w[2][CHUNKS];

    __device__ __forceinline__ void fetch(const Word* x, int lane) {
        int t = lane & 3;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint4* from = (const uint4*)(x + RUN * t + 4 * RUN * k);
#pragma unroll
            for (int i = 0; i < CHUNKS / 4; i++) {
                uint4 four = __ldg(from + i);
                w[k][4 * i] = four.x, w[k][4 * i + 1] = four.y, w[k][4 * i + 2] = four.z, w[k][4 * i + 3] = four.w;
            }
        }
    }
};

__device__ __forceinline__ float quotient(float x, float y) {
    float z;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float square_root(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// c becomes the product, norm the squared norms of this thread's two vectors: the diagonal of X transposed times X. Its
// left operand is two registers next to each other, as they were loaded; with the first of them as the right operand,
// rows 0 to 7 of the result are of use, with the second rows 8 to 15.
__device__ __forceinline__ void transform(const Encoder& encoder, const Piece& piece, float (&c)[CHUNKS][4],
                                          float (&norm)[2], int lane) {
    float first[4] = {0.f, 0.f, 0.f, 0.f}, second[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
        PRODUCT(MMA, c[j], encoder.a, piece.w[0][j] ^ encoder.flip[0][j], piece.w[1][j] ^ encoder.flip[1][j]);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (j % 2 == 0) PRODUCT_K8(first, piece.w[k][j], piece.w[k][j + 1], piece.w[k][j]);
            else PRODUCT_K8(second, piece.w[k][j - 1], piece.w[k][j], piece.w[k][j]);
        }
    }
    float own = lane & 4 ? first[1] + second[3] : first[0] + second[2];  // thread 4 n + n / 2 has vector n's
    int source = 9 * (lane & 3);
    norm[0] = __shfl_sync(FULL, own, source);
    norm[1] = __shfl_sync(FULL, own, source + 4);
}

// What quantizing a thread's part of a vector gives: a bit of each plane for each element, and sums for the scale.
template <int BITS>
struct Part {
    u32 plane[BITS];
    float dot, square;

    // Element e of the part is at v + 2 (e % 2) of chunk e / 2. Integer instructions are what there is least of, so bits
    // are set by adding powers of two to a float, 16 at a time: 2**23 keeps them the low bits of the mantissa.
    __device__ __forceinline__ void quantize(const float (&c)[CHUNKS][4], int v, float rms) {
        const int cuts = (1 << (BITS - 1)) - 1, groups = (RUN + 15) / 16;
        float cut[cuts], sum = 0.f, above[cuts], set[cuts][groups];
        u32 over[cuts], minus = 0;
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            cut[k] = cut_at<BITS>(k) * rms, above[k] = 0.f;
#pragma unroll
            for (int i = 0; i < groups; i++) set[k][i] = 8388608.f;
        }
#pragma unroll
        for (int e = RUN - 1; e >= 0; e--) {
            float y = c[e / 2][v + 2 * (e % 2)], magnitude = fabsf(y);
            const float bit = (float)(1 << e % 16);
            minus = __funnelshift_l(b(y), minus, 1);
            sum += magnitude;
#pragma unroll
            for (int k = 0; k < cuts; k++)
                if (magnitude > cut[k]) set[k][e / 16] += bit, above[k] += magnitude;
        }
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            over[k] = b(set[k][0]) & 0xffffu;
            if constexpr (groups == 2) over[k] |= b(set[k][1]) << 16;
        }
        plane[0] = minus;
        dot = level<BITS>(0) * sum;
        square = RUN * level<BITS>(0) * level<BITS>(0);
        // The level is a staircase: each cut that is passed adds a step to it, and to its square.
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            const float low = level<BITS>(k), high = level<BITS>(k + 1);
            dot = fmaf(high - low, above[k], dot);
            square = fmaf(high * high - low * low, (float)__popc(over[k]), square);
        }
#pragma unroll
        for (int p = 1; p < BITS; p++) {  // bit p of a count of passed cuts: the parity of every 2**p-th cut
            plane[p] = 0;
#pragma unroll
            for (int k = (1 << (BITS - 1 - p)) - 1; k < cuts; k += 1 << (BITS - 1 - p)) plane[p] ^= over[k];
        }
    }
};

// Encode 8 transformed vectors, `valid` of which exist; returns a bit for each that needs encode_vector.
template <int BITS>
__device__ __forceinline__ u32 encode_tile(float (&c)[CHUNKS][4], const float (&norm)[2], u8* scales, u8* planes,
                                           int valid, int lane) {
    int g = lane >> 2, t = lane & 3, odd = g & 1;
    butterflies(c);
    Part<BITS> part[2];
    part[0].quantize(c, 0, square_root(norm[0]));
    part[1].quantize(c, 1, square_root(norm[1]));
    const int width = BITS * HEAD_DIM / 8;
#pragma unroll
    for (int p = 0; p < BITS; p++) {
        u8* at = planes + p * (HEAD_DIM / 8);
        u32 zero = part[0].plane[p], one = part[1].plane[p];
        if constexpr (RUN == 32) {
            at += 2 * t * width + 4 * g;
            if (2 * t < valid) *(u32*)at = zero;
            if (2 * t + 1 < valid) *(u32*)(at + width) = one;
        } else {  // neighbours swap, so that each writes twice as much of one vector
            u32 other = __shfl_xor_sync(FULL, odd ? zero : one, 4);
            u32 both = odd ? other | one << RUN : zero | other << RUN;
            at += (2 * t + odd) * width + RUN / 4 * (g / 2);
            if (2 * t + odd < valid) {
                if constexpr (RUN == 16) *(u32*)at = both;
                else *(u16*)at = (u16)both;
            }
        }
    }
    // Thread g < 2 ends with the scale of vector 2t + g.
    float dot = halve(part[0].dot, part[1].dot, 4, lane), square = halve(part[0].square, part[1].square, 4, lane);
    float sum = halve(dot, square, 8, lane);
    sum += __shfl_xor_sync(FULL, sum, 16);
    float scale = quotient(sum, __shfl_xor_sync(FULL, sum, 8)) * f(ROOT);
    if (g < 2 && 2 * t + g < valid) *(u16*)(scales + 4 * t + 2 * g) = min(bf16_bits(b(scale)), 0x7f7fu);
    float own = odd ? norm[1] : norm[0];
    u32 slow = (own > 1e-20f && own < 1e30f ? 0u : 1u) << (2 * t + odd);
    return __reduce_or_sync(FULL, slow) & ((1u << valid) - 1);
}

// Element e: bits 2 and 3 are row bits 0 and 3 of B, the two highest are t, the others the chunk: a plane word's
// nibbles then turn into lookups (prmt) of four elements at a time. Row g + 8 i of chunk j's product is the element with
// bit 2 = i, bit 3 = g & 1, the two highest = g >> 1, and the others those of j.
#define WORDS ((HEAD_DIM + 127) / 128)  // plane words of a vector in one thread

struct Decoder {
    u32 a[4], flip[CHUNKS / 4][4];

    __device__ __forceinline__ Decoder(int lane) {
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; i++) a[i] = ones(0x3c00u, __popc((g >> 1) & t) + (g & (i >> 1)), i & 1);
#pragma unroll
        for (int h = 0; h < CHUNKS / 4; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int e = 8 * (g & 1) + 16 * h + HEAD_DIM / 4 * (g >> 1) + 2 * i;
                u32 two = SIGNS[e / 32] >> (e % 32);
                flip[h][i] = ONE * 0x10001u | (two & 1) << 15 | (two & 2) << 30;
            }
    }
};

template <int BITS>
struct Packed {  // a thread's share of vector g's planes, and the scales of its two output vectors
    u32 w[BITS][WORDS], scales;

    __device__ __forceinline__ void fetch(const u8* from_scales, const u8* from_planes, int valid, int lane) {
        int g = lane >> 2, t = lane & 3;
        const u8* at = from_planes + min(g, valid - 1) * (BITS * HEAD_DIM / 8) + t * (HEAD_DIM / 32);
#pragma unroll
        for (int p = 0; p < BITS; p++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const u8* word = at + p * (HEAD_DIM / 8) + 4 * i;
                w[p][i] = HEAD_DIM == 64 ? *(const u16*)word : *(const u32*)word;
            }
        if (2 * t + 1 < valid) scales = *(const u32*)(from_scales + 4 * t);
        else scales = 2 * t < valid ? *(const u16*)(from_scales + 4 * t) : 0u;
    }
};

// The bits of a plane word at positions 4 i + b, as bit p of nibble i.
__device__ __forceinline__ u32 spread(u32 word, int b, int p) {
    return (b > p ? word >> (b - p) : word << (p - b)) & (0x11111111u << p);
}

// Four levels by the nibbles of `code`, as two pairs of fp16: their high and low bytes are looked up apart.
template <int BITS>
__device__ __forceinline__ void look_up(int part, u32 code, u32 minus, u32& pair0, u32& pair1) {
    const u32* table = BITS == 3 ? HALVES_3[part] : HALVES_4[part];
    u32 low = __byte_perm(table[0], table[1], code), high = __byte_perm(table[2], table[3], code);
    if (BITS == 4) high ^= minus;
    pair0 = __byte_perm(low, high, 0x5140);
    pair1 = __byte_perm(low, high, 0x7362);
}

// Two numbers rounded to the cache's dtype, times +-1; adding 0 leaves no -0.
__device__ __forceinline__ u32 pair_of(float low, float high, u32 flip) {
    u32 pair;
#if DTYPE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(flip), "r"(0));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(flip), "r"(0));
#endif
    return pair;
}

// Decode 8 vectors, `valid` of which exist; returns a bit for each whose scale is not finite or may overflow.
template <int BITS>
__device__ __forceinline__ u32 decode_tile(const Decoder& decoder, const Packed<BITS>& packed, Word* x, int stride,
                                           int valid, int lane) {
    int g = lane >> 2, t = lane & 3;
    float c[CHUNKS][4];
#pragma unroll
    for (int i = 0; i < WORDS; i++)
#pragma unroll
        for (int bit = 0; bit < 4; bit++) {
            u32 code = spread(packed.w[BITS - 1][i], bit, 0) | spread(packed.w[BITS - 2][i], bit, 1) |
                       spread(packed.w[BITS - 3][i], bit, 2);
            u32 sign = BITS == 4 ? spread(packed.w[0][i], bit, 0) : 0u;
#pragma unroll
            for (int half = 0; half < (HEAD_DIM == 64 ? 1 : 2); half++) {
                float(&to)[4] = c[bit + 4 * half + 8 * i];
                u32 minus = BITS == 4 ? __byte_perm(0x8000u, 0u, sign >> 16 * half) : 0u;
                u32 b0, b1;
                to[0] = to[1] = to[2] = to[3] = 0.f;
                look_up<BITS>(0, code >> 16 * half, minus, b0, b1);
                PRODUCT(MMA_F16, to, decoder.a, b0, b1);
                look_up<BITS>(1, code >> 16 * half, minus, b0, b1);
                PRODUCT(MMA_F16, to, decoder.a, b0, b1);
            }
        }
    butterflies(c);
    u32 slow = 0;
#pragma unroll
    for (int v = 0; v < 2; v++) {
        float scale = f(v ? packed.scales & 0xffff0000u : packed.scales << 16);
        // No sum exceeds 2.74 HEAD_DIM: beyond this scale the result may be too large for its dtype.
        if (!(fabsf(scale) < (DTYPE == 1 ? 1400.f : 1e34f))) slow |= 1u << (2 * t + v);
        scale *= f(ROOT);
        if (2 * t + v < valid) {
            Word* to = x + (2 * t + v) * stride + 8 * (g & 1) + HEAD_DIM / 4 * (g >> 1);
#pragma unroll
            for (int h = 0; h < CHUNKS / 4; h++) {
                uint4 eight;
                eight.x = pair_of(c[4 * h][v] * scale, c[4 * h + 1][v] * scale, decoder.flip[h][0]);
                eight.y = pair_of(c[4 * h + 2][v] * scale, c[4 * h + 3][v] * scale, decoder.flip[h][1]);
                eight.z = pair_of(c[4 * h][v + 2] * scale, c[4 * h + 1][v + 2] * scale, decoder.flip[h][2]);
                eight.w = pair_of(c[4 * h + 2][v + 2] * scale, c[4 * h + 3][v + 2] * scale, decoder.flip[h][3]);
                *(uint4*)(to + 16 * h) = eight;
            }
        }
    }
    return __reduce_or_sync(FULL, slow) & ((1u << valid) - 1);
}
#else
struct Encoder {
    __device__ __forceinline__ Encoder(int) {}
};
typedef Encoder Decoder;
#endif

// ---- all layers of many blocks -----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 tiles_of_layer(const Job& job) { return job.heads * ((job.tokens + TILE - 1) / TILE); }

struct Place {  // a tile of the keys, or of the values, of one layer of one block, and how many tiles follow in it
    Word* x;
    u8 *scales, *planes;
    int kind, block, index, token, tiles;

    __device__ __forceinline__ Place(const Job& job, u32 tile) {
        u32 of_layer = tiles_of_layer(job), of_head = (job.tokens + TILE - 1) / TILE, in_layer = tile % of_layer;
        tile /= of_layer;
        int layer = tile % (u32)job.layers;
        tile /= (u32)job.layers;
        kind = job.first_kind + tile % (u32)job.kinds;
        block = tile / (u32)job.kinds;
        tiles = of_layer - in_layer;
        int head = in_layer / of_head;
        token = in_layer % of_head * TILE;
        x = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind];
        x += head * job.head_stride + token * job.token_stride;
        u8* codes = job.codes + job.slots[block] * job.slot_stride + job.payload[kind];
        i64 vectors = (i64)job.heads * job.tokens;
        index = layer * vectors + head * job.tokens + token;
        scales = codes + 2 * index;
        int bits = kind ? VALUE_BITS : KEY_BITS;
        planes = codes + (2 * vectors * job.layers + 15) / 16 * 16 + index * (i64)(bits * (HEAD_DIM / 8));
    }
    __device__ __forceinline__ void next(const Job& job, int width) {
        scales += 2 * valid(job);
        planes += width * valid(job);
        index += valid(job);
        token += TILE;
        x += TILE * job.token_stride;
        if (token >= job.tokens) {
            x += job.head_stride - token * job.token_stride;
            token = 0;
        }
    }
    __device__ __forceinline__ Word* vector(const Job& job, int t) const { return x + t * job.token_stride; }
    __device__ __forceinline__ int valid(const Job& job) const { return WHOLE ? TILE : min(TILE, job.tokens - token); }
};

template <int BITS>
__device__ __forceinline__ void encode_run(const Job& job, Place place, const Encoder& encoder, int lane, float* sums) {
    const int width = BITS * (HEAD_DIM / 8);
#if FAST
    Piece piece;
    piece.fetch(place.vector(job, min(lane >> 2, place.valid(job) - 1)), lane);
#endif
    for (int tile = 0; tile < place.tiles; tile++) {
        const Place now = place;
        int valid = now.valid(job);
        place.next(job, width);
        u32 slow = (1u << valid) - 1;
#if FAST
        float c[CHUNKS][4], norm[2];
        transform(encoder, piece, c, norm, lane);
        if (tile + 1 < place.tiles) piece.fetch(place.vector(job, min(lane >> 2, place.valid(job) - 1)), lane);
        slow = encode_tile<BITS>(c, norm, now.scales, now.planes, valid, lane);
        if (slow) __syncwarp();
#endif
        for (; slow; slow &= slow - 1) {
            int t = __ffs(slow) - 1;
            bool finite = encode_vector<BITS>(now.vector(job, t), now.scales + 2 * t, now.planes + t * width, lane, sums);
            if (!finite && lane == 0) atomicMin(job.status + now.block, now.index + t);
        }
    }
}

template <int BITS>
__device__ __forceinline__ void decode_run(const Job& job, Place place, const Decoder& decoder, int lane) {
    const int width = BITS * (HEAD_DIM / 8);
#if FAST
    Packed<BITS> packed;
    packed.fetch(place.scales, place.planes, place.valid(job), lane);
#endif
    for (int tile = 0; tile < place.tiles; tile++) {
        const Place now = place;
        int valid = now.valid(job);
        place.next(job, width);
        u32 slow = (1u << valid) - 1;
#if FAST
        Packed<BITS> these = packed;
        if (tile + 1 < place.tiles) packed.fetch(place.scales, place.planes, place.valid(job), lane);
        slow = decode_tile<BITS>(decoder, these, now.vector(job, 0), job.token_stride, valid, lane);
        if (slow) __syncwarp();
#endif
        for (; slow; slow &= slow - 1) {
            int t = __ffs(slow) - 1;
            bool finite = decode_vector<BITS>(now.scales + 2 * t, now.planes + t * width, now.vector(job, t), lane);
            if (!finite && lane == 0) atomicMin(job.status + now.block, now.index + t);
        }
    }
}

#define WARPS (THREADS / 32)

struct Range {  // the tiles of this warp: all warps of the launch share them evenly
    u32 tile, end;

    __device__ __forceinline__ Range(const Job& job) {
        u32 all = (u32)job.n * job.kinds * job.layers * tiles_of_layer(job);
        u32 warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = gridDim.x * WARPS;
        u32 each = all / warps, more = all % warps;  // the first so many warps take one more
        tile = warp * each + min(warp, more);
        end = tile + each + (warp < more);
    }
    __device__ __forceinline__ void take(Place& place) {
        place.tiles = min((u32)place.tiles, end - tile);
        tile += place.tiles;
    }
};

// status: GOOD must be there before; becomes the first vector that is not finite.
extern "C" __global__ void __launch_bounds__(THREADS, 1) encode(const Job job) {
    __shared__ float sums[WARPS][64];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Encoder encoder(lane);
    Range range(job);
    while (range.tile < range.end) {
        Place place(job, range.tile);
        range.take(place);
        if (KEY_BITS == VALUE_BITS || place.kind == 0) encode_run<KEY_BITS>(job, place, encoder, lane, sums[warp]);
        else encode_run<VALUE_BITS>(job, place, encoder, lane, sums[warp]);
    }
}

// Blocks whose status is below 0, which `verify` has refused, are left alone; of the others it becomes the first vector
// whose scale is not finite.
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const Job job) {
    int lane = threadIdx.x % 32;
    const Decoder decoder(lane);
    Range range(job);
    while (range.tile < range.end) {
        Place place(job, range.tile);
        range.take(place);
        if (*(volatile int*)(job.status + place.block) < 0) continue;
        if (KEY_BITS == VALUE_BITS || place.kind == 0) decode_run<KEY_BITS>(job, place, decoder, lane);
        else decode_run<VALUE_BITS>(job, place, decoder, lane);
    }
}
