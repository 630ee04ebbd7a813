// The header and checksum of encoded blocks: xxh3-64 of all bytes of a block but the checksum's own, one warp a block.
//
// xxh3 keeps 8 sums of 64 bits. A stripe of 64 bytes adds to all of them; stripes 0 to 15 of a kibibyte do so with
// different parts of the secret, and then the sums are scrambled. Within a kibibyte the additions commute: lane i % 8
// works for sum i, and the warp takes four stripes at a time. START, SECRET, LAST and MERGE come from Python.

#define STRIPES 16
#define CHECKSUM_AT 8

__device__ __forceinline__ u64 shuffle_xor(u64 x, int mask) { return __shfl_xor_sync(FULL, x, mask); }

__device__ __forceinline__ u64 folded_product(u64 x, u64 y) { return x * y ^ __umul64hi(x, y); }

// The i-th 8 bytes of a block with the checksum left out.
__device__ __forceinline__ u64 word_at(const u8* block, i64 i) { return *(const u64*)(block + 8 * i + (i ? 8 : 0)); }

__device__ u64 checksum(const u8* block, i64 nbytes, int lane) {
    const i64 length = nbytes - 8, kibibytes = (length - 1) / 1024;
    const int i = lane % 8, first = lane / 8;
    u64 sum = START[i], secret[4], ahead[4];
    const u64 scramble = SECRET[16 + i];
#pragma unroll
    for (int k = 0; k < 4; k++) secret[k] = SECRET[first + 4 * k + i];
    auto fetch = [&](i64 kibibyte, int stripes) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int stripe = first + 4 * k;
            ahead[k] = stripe < stripes ? word_at(block, kibibyte * 128 + 8 * stripe + i) : 0;
        }
    };
    const int rest = (length - 1 - kibibytes * 1024) / 64;
    auto add = [&](int stripes) {
        u64 products = 0, plain = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u64 keyed = ahead[k] ^ secret[k];
            if (first + 4 * k < stripes) products += (keyed & 0xffffffffu) * (keyed >> 32);
            plain += ahead[k];
        }
        products += shuffle_xor(plain, 1);
        products += shuffle_xor(products, 8);
        products += shuffle_xor(products, 16);
        sum += products;
    };
    fetch(0, kibibytes ? STRIPES : rest);
    for (i64 kibibyte = 0; kibibyte < kibibytes; kibibyte++) {
        add(STRIPES);
        fetch(kibibyte + 1, kibibyte + 1 < kibibytes ? STRIPES : rest);
        sum = (sum ^ sum >> 47 ^ scramble) * 0x9E3779B1ull;
    }
    add(rest);
    u64 last = word_at(block, length / 8 - 8 + i), keyed = last ^ LAST[i];
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

// Write the blocks' headers, what fills their sections up, and their checksums.
extern "C" __global__ void seal(const Job job) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int block = blockIdx.x * WARPS + warp; block < job.n; block += gridDim.x * WARPS) {
        u8* out = job.codes + job.offsets[block];
        const u64* header = (const u64*)(job.headers + block * job.head_nbytes);
        for (int i = lane; i < job.head_nbytes / 8; i += 32) ((u64*)out)[i] = header[i];
        for (int i = 0; i < 4; i++)
            if (lane < (-job.ends[i] & 15)) out[job.ends[i] + lane] = 0;
        __syncwarp();
        u64 sum = checksum(out, job.nbytes, lane);
        if (lane == 0) *(u64*)(out + CHECKSUM_AT) = sum;
    }
}

// status: GOOD, BAD_CHECKSUM, or BAD_HEADER minus the offset of the first byte that is not the expected header's.
extern "C" __global__ void verify(const Job job) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int block = blockIdx.x * WARPS + warp; block < job.n; block += gridDim.x * WARPS) {
        const u8 *found = job.codes + job.offsets[block], *wanted = job.headers + block * job.head_nbytes;
        const u32 end = job.head_nbytes;
        u32 differs = end;
        for (u32 i = lane; i < end; i += 32)
            if (found[i] != wanted[i] && (i < CHECKSUM_AT || i >= CHECKSUM_AT + 8)) differs = min(differs, i);
        differs = __reduce_min_sync(FULL, differs);
        bool right = checksum(found, job.nbytes, lane) == *(const u64*)(found + CHECKSUM_AT);
        if (lane == 0) job.status[block] = !right ? BAD_CHECKSUM : differs < end ? BAD_HEADER - (int)differs : GOOD;
    }
}
