// Headers and checksums of encoded blocks. A checksum is the xxh3-64 of an encoded block without refinements and the
// checksum's own bytes. A thread block takes an encoded block.
//
// xxh3 keeps 8 sums of 64 bits. A stripe of 64 bytes adds to all of them; stripes 0 to 15 of a kibibyte do so with
// different parts of the secret, and then the sums are scrambled. Within a kibibyte the additions commute: a warp takes
// four stripes of a kibibyte at a time, and lane i adds to sum i % 8. The first warp scrambles sums of some kibibytes
// while the other warps add up the next ones. START, SECRET, LAST and MERGE come from Python.

#define STRIPES 16
#define CHECKSUM_AT 8
#define EACH 4                          // kibibytes of a warp in a round
#define ROUND (EACH * (WARPS - 1))

__device__ __forceinline__ u64 shuffle_xor(u64 x, int mask) { return __shfl_xor_sync(FULL, x, mask); }

__device__ __forceinline__ u64 folded_product(u64 x, u64 y) { return x * y ^ __umul64hi(x, y); }

struct Whole {  // words of an encoded block with the checksum left out
    const u8* block;
    __device__ __forceinline__ u64 word(i64 i) const { return *(const u64*)(block + 8 * i + (i ? 8 : 0)); }
};

// Return the xxh3-64 of `length` bytes, a multiple of 8 above 240; only the first warp gets it. source: gives words.
template <typename Source>
__device__ u64 long_checksum(const Source& source, i64 length) {
    __shared__ u64 added[2][ROUND][8];
    const i64 kibibytes = (length - 1) / 1024;
    const int rest = (length - 1 - kibibytes * 1024) / 64;  // stripes of the last kibibyte, which is not scrambled
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane % 8, first = lane / 8;
    u64 sum = START[i], secret[4];
    const u64 scramble = SECRET[16 + i];
#pragma unroll
    for (int k = 0; k < 4; k++) secret[k] = SECRET[first + 4 * k + i];
    for (i64 begin = 0, round = 0; begin <= kibibytes; begin += ROUND, round++) {
        u64(*sums)[8] = added[round % 2];
        if (warp > 0) {
            u64 words[EACH][4];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const i64 kibibyte = begin + EACH * (warp - 1) + e;
                const int stripes = kibibyte < kibibytes ? STRIPES : kibibyte == kibibytes ? rest : 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    int stripe = first + 4 * k;
                    words[e][k] = stripe < stripes ? source.word(kibibyte * 128 + 8 * stripe + i) : secret[k];
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const i64 kibibyte = begin + EACH * (warp - 1) + e;
                const int stripes = kibibyte < kibibytes ? STRIPES : kibibyte == kibibytes ? rest : 0;
                u64 products = 0, plain = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    u64 keyed = words[e][k] ^ secret[k];
                    products += (keyed & 0xffffffffu) * (keyed >> 32);
                    if (first + 4 * k < stripes) plain += words[e][k];
                }
                products += shuffle_xor(plain, 1);
                products += shuffle_xor(products, 8);
                products += shuffle_xor(products, 16);
                if (lane < 8) sums[EACH * (warp - 1) + e][lane] = products;
            }
        }
        __syncthreads();
        if (warp == 0) {
            const int here = min((i64)ROUND, kibibytes + 1 - begin);
#pragma unroll 4
            for (int k = 0; k < here; k++) {
                sum += sums[k][i];
                if (begin + k < kibibytes) sum = (sum ^ sum >> 47 ^ scramble) * 0x9E3779B1ull;
            }
        }
    }
    __syncthreads();  // `added` is used again for the next block
    u64 last = source.word(length / 8 - 8 + i), keyed = last ^ LAST[i];
    sum += (keyed & 0xffffffffu) * (keyed >> 32) + shuffle_xor(last, 1);
    u64 merged = sum ^ MERGE[i];
    merged = folded_product(merged, shuffle_xor(merged, 1));
    if (i % 2) merged = 0;
    merged += shuffle_xor(merged, 2);
    merged += shuffle_xor(merged, 4);
    merged += (u64)length * 0x9E3779B185EBCA87ull;
    merged = __shfl_sync(FULL, merged, 0);
    merged = (merged ^ merged >> 37) * 0x165667919E3779F9ull;
    return merged ^ merged >> 32;
}

__device__ u64 checksum(const u8* block, i64 nbytes) { return long_checksum(Whole{block}, nbytes - 8); }

// Write headers, zeros behind `ends`, and checksums.
extern "C" __global__ void __launch_bounds__(THREADS) seal(const Job job) {
    const int thread = threadIdx.x;
    for (int block = blockIdx.x; block < job.n; block += gridDim.x) {
        u8* out = job.buffer + job.offsets[block];
        const u64* header = (const u64*)(job.headers + block * job.head_nbytes);
        for (int i = thread; i < job.head_nbytes / 8; i += THREADS) ((u64*)out)[i] = header[i];
        for (int i = 0; i < 4; i++)
            if (thread < (-job.ends[i] & 15)) out[job.ends[i] + thread] = 0;
        __syncthreads();
        u64 sum = checksum(out, job.sizes ? job.sizes[block] : job.nbytes);
        if (thread == 0) *(u64*)(out + CHECKSUM_AT) = sum;
    }
}

// status: GOOD, BAD_CHECKSUM, or BAD_HEADER minus the offset of the first byte that is not the expected header's.
extern "C" __global__ void __launch_bounds__(THREADS) verify(const Job job) {
    const int thread = threadIdx.x;
    for (int block = blockIdx.x; block < job.n; block += gridDim.x) {
        const u8 *found = job.buffer + job.offsets[block], *wanted = job.headers + block * job.head_nbytes;
        bool right = checksum(found, job.nbytes) == *(const u64*)(found + CHECKSUM_AT);
        const u32 end = job.head_nbytes;
        u32 differs = end;
        for (u32 i = thread; i < end && thread < 32; i += 32)
            if (found[i] != wanted[i] && (i < CHECKSUM_AT || i >= CHECKSUM_AT + 8)) differs = min(differs, i);
        differs = __reduce_min_sync(FULL, differs);
        if (thread == 0) job.status[block] = !right ? BAD_CHECKSUM : differs < end ? BAD_HEADER - (int)differs : GOOD;
    }
}
