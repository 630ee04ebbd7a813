// Sections whose numbers stay as they are: the keys of all layers, then the values. A warp takes a head's tokens.

#if ALIGNED
typedef uint4 Unit;
#else
typedef Word Unit;
#endif
#define UNITS (HEAD_DIM * (int)sizeof(Word) / (int)sizeof(Unit))  // of a vector

template <bool OUT>
__device__ __forceinline__ void copy_exact(const Job& job) {
    int lane = threadIdx.x % 32;
    u32 warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = gridDim.x * WARPS;
    for (u32 run = warp; run < (u32)job.n * 2 * job.layers * job.heads; run += warps) {
        u32 rest = run / job.heads, head = run % job.heads, layer = rest % job.layers;
        rest /= job.layers;
        int kind = rest % 2, block = rest / 2;
        if (!OUT && job.status[block] != GOOD) continue;
        Word* paged = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind];
        paged += head * job.head_stride;
        u8* codes = job.codes + job.offsets[block] + job.payload[kind];
        Unit* kept = (Unit*)codes + (i64)(layer * job.heads + head) * job.tokens * UNITS;
        for (int i = lane; i < job.tokens * UNITS; i += 32) {
            Unit* vector = (Unit*)(paged + i / UNITS * job.token_stride);
            if (OUT) kept[i] = vector[i % UNITS];
            else vector[i % UNITS] = kept[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) encode_exact(const Job job) { copy_exact<true>(job); }

// Blocks whose status is not GOOD are left alone.
extern "C" __global__ void __launch_bounds__(THREADS) decode_exact(const Job job) { copy_exact<false>(job); }
