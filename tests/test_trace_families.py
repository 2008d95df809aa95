import pytest
from traces import SGLANG, kernel, write

from dsv4lab import trace
from dsv4lab.trace import families, summary

OURS = families.load()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fused_moe_kernel", "moe_gemm"),
        ("triton_poi_fused__scaled_mm_0", "glue_elementwise"),
        ("triton_red_fused_add_1", "glue_reduce"),
        ("triton_tem_fused_mm_2", "gemm"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        ("_w8a8_triton_block_scaled_mm", "gemm"),
        ("_fp8_paged_mqa_logits_rowwise_kernel", "indexer"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, x>", "glue_fill"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "nccl"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "nccl"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>", "collective"),
        ("mhc_post_tilelang_kernel", "hyper_connections"),
        ("hc_head_sums_kernel", "hyper_connections"),
        ("hc_head_mix_kernel", "hyper_connections"),
        ("Cijk_Alik_Bljk_BBS_BH_MT64x64x64_MI16x16x16", "gemm"),
        ("_tiled_sparse_decode_kernel", "sparse_attention"),
        ("split_k_kernel", "sparse_attention"),
        ("logits_kernel", "indexer"),
        ("void (anonymous namespace)::fused_k_norm_rope_flashmla<__nv_bfloat16, 512l>", "norm_rope"),
        ("void (anonymous namespace)::flash_c128_decode<512l, float>", "kv_compress"),
        ("flash_fwd_splitkv_mla_kernel", "sparse_attention"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "dense_attention"),
        ("cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>", "gemm_simt"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_ffma_aligna4_cublas", "gemm_simt"),
        ("void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512>(Params)", "sparse_attention"),
        ("void fbgemm_gpu::split_embedding_codegen_forward_unweighted_kernel<c10::Half>(long)", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::_float_to_hfp8_gpu()>", "glue_elementwise"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int)", "gemm_simt"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>()", "gemm_simt"),
        ("void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x128_32x3_nhwc>", "gemm"),
        ("cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false>", "gemm_simt"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, bf16>", "gemm"),
        ("split_embedding_backward_codegen_rowwise_adagrad_kernel", "other"),
        ("somebody_elses_kernel", "other"),
    ],
)
def test_a_name_alone_gives_the_family(name, family):
    assert OURS.of("kernel", name) == family


@pytest.mark.parametrize(
    ("op", "parents", "family"),
    [
        ("aten::copy_", "", "glue_copy"),
        ("aten::bmm", "", "gemm"),
        ("inner", "record_param_comms < c10d::allreduce_", "nccl"),
        ("aten::clamp_min", "aten::clamp", "glue_elementwise"),
        ("aten::unheard_of", "", "other"),
    ],
)
def test_the_op_gives_the_family_where_the_name_does_not(op, parents, family):
    assert OURS.of("kernel", "renamed", op, parents) == family


def test_copies_and_fills_are_known_by_kind():
    assert (OURS.of("memcpy", "x"), OURS.of("memset", "x")) == ("memcpy", "memset")


def test_rules_of_a_file_go_before_ours_and_may_bring_families(tmp_path):
    rules = tmp_path / "mine.toml"
    rules.write_text(
        '[families]\nsketch = "my sketch"\n'
        "[[rule]]\nfamily = 'sketch'\nkernel = '^sketch_kernel$|^_combine$'\n"
        "[[rule]]\nfamily = 'indexer'\nkernel = '^_idx$'\n"
    )
    mine = families.load(rules)
    assert mine.titles["sketch"] == "my sketch" and mine.titles["gemm"] == OURS.titles["gemm"]
    sums = summary.by(trace.read(SGLANG, rules), "family").set_index("family")["sum_ns"]
    assert sums["sketch"] == 364_128 + 67_010  # the attention sketches of that trace, and their combine
    assert sums["indexer"] == 34_530 + 31_744


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rule = ", "rules mine.toml: "),
        ("[[rule]]\nfamily = 'nothing'\nkernel = 'x'", "rule 1: family 'nothing' is not among the families"),
        ("[[rule]]\nfamily = 'gemm'", "rule 1: must give family and some of kernel, op, kind"),
        ("[[rule]]\nfamily = 'gemm'\nname = 'x'", "rule 1: must give family and some of kernel, op, kind"),
        ("[[rule]]\nfamily = 'gemm'\nkernel = '('", "rule 1: missing \\)"),
    ],
)
def test_a_bad_rule_is_named(tmp_path, text, says):
    rules = tmp_path / "mine.toml"
    rules.write_text(text)
    with pytest.raises(ValueError, match=says):
        families.load(rules)


def test_what_belongs_to_no_family_is_listed_by_name(tmp_path):
    events = [kernel("nvjet_a", 0, 60), kernel("strange", 70, 30), kernel("stranger", 110, 10)]
    unmatched = summary.unmatched(trace.read(write(tmp_path / "t.json", events)))
    assert unmatched["name"].tolist() == ["strange", "stranger"]
    assert unmatched["share"].tolist() == [0.3, 0.1]


def test_families_of_our_own_trace():
    table = summary.by(trace.read(SGLANG), "family").set_index("family")
    assert table["sum_ns"].sum() == 15_152_778  # kernels and copies
    assert table["calls"].sum() == 1267
    assert table.loc["moe_gemm", ["calls", "sum_ns"]].tolist() == [36, 8_101_959]
    assert table.loc["gemm_simt", "calls"] == 108  # 36 SIMT GEMMs and the two passes that add up their parts
    assert table["share"].sum() == pytest.approx(1)
