// Exact sections of encoded blocks, whose numbers are copied: the keys of all layers, then any values. A warp takes the
// tokens of a head, layer and kind in a KV block. OUT: true to encode.

#if ALIGNED
typedef uint4 Unit;
#else
typedef Word Unit;
#endif
#define UNITS (HEAD_DIM * (int)sizeof(Word) / (int)sizeof(Unit))  // of a vector of HEAD_DIM numbers

// KNOWN: number of units in a vector if it is UNITS; else 0, and the number follows from `job`.
template <bool OUT, int KNOWN>
__device__ __forceinline__ void copy_exact(const Job& job) {
    int lane = threadIdx.x % 32;
    const int units = KNOWN ? KNOWN : job.vector_nbytes / (int)sizeof(Unit);
    u32 warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = gridDim.x * WARPS;
    for (u32 run = warp; run < (u32)job.n * job.kinds * job.layers * job.heads; run += warps) {
        u32 rest = run / job.heads, head = run % job.heads, layer = rest % job.layers;
        rest /= job.layers;
        int kind = rest % (u32)job.kinds, block = rest / (u32)job.kinds;
        if (!OUT && job.status[block] != GOOD) continue;
        Word* paged = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind];
        paged += head * job.head_stride;
        u8* buffer = job.buffer + job.offsets[block] + job.payload[kind];
        Unit* kept = (Unit*)buffer + (i64)(layer * job.heads + head) * job.tokens * units;
        for (int i = lane; i < job.tokens * units; i += 32) {
            Unit* vector = (Unit*)(paged + i / units * job.token_stride);
            if (OUT) kept[i] = vector[i % units];
            else vector[i % units] = kept[i];
        }
        if (OUT && run % ((u32)job.kinds * job.layers * job.heads) == (u32)job.kinds * job.layers * job.heads - 1) {
            u8* end = (u8*)(kept + job.tokens * units);  // zeros follow up to the next multiple of 16
            if (lane < (int)(-(u64)end & 15)) end[lane] = 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) encode_exact(const Job job) {
    if (job.vector_nbytes == UNITS * sizeof(Unit)) copy_exact<true, UNITS>(job);
    else copy_exact<true, 0>(job);
}

// KV blocks whose status is not GOOD are left alone.
extern "C" __global__ void __launch_bounds__(THREADS) decode_exact(const Job job) {
    if (job.vector_nbytes == UNITS * sizeof(Unit)) copy_exact<false, UNITS>(job);
    else copy_exact<false, 0>(job);
}
