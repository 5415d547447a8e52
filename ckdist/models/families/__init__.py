"""One file per family. `NAMES` has the names of each in the files of models."""

# File -> words: the family's name, which is a `model_type` too; its `architectures`, which begin with a capital; more
# types; and after a colon the `general.architecture` of its GGUF files, unless that is the name.
# A start imports only the file of its model's family.
NAMES = {
    "bailing_moe_v2": "bailing_moe_v2 BailingMoeV2ForCausalLM :bailingmoe2",
    "bamba": "bamba BambaForCausalLM",
    "bart": "bart BartForConditionalGeneration",
    "bert": "bert BertModel BertForMaskedLM BertForSequenceClassification",
    "cohere2": "cohere2 Cohere2ForCausalLM",
    "deepseek_v2": "deepseek_v2 DeepseekV2ForCausalLM :deepseek2",
    "deepseek_v3": "deepseek_v3 DeepseekV3ForCausalLM",
    "deepseek_v32": "deepseek_v32 DeepseekV32ForCausalLM :deepseek32",
    "dots1": "dots1 Dots1ForCausalLM",
    "embedding_gemma": "embedding_gemma Gemma3TextModel :gemma-embedding",
    "ernie4_5": "ernie4_5 Ernie4_5ForCausalLM Ernie4_5_ForCausalLM",
    "ernie4_5_moe": "ernie4_5_moe Ernie4_5_MoeForCausalLM :ernie4_5-moe",
    "exaone4": "exaone4 Exaone4ForCausalLM",
    "falcon_h1": "falcon_h1 FalconH1ForCausalLM :falcon-h1",
    "gemma": "gemma GemmaForCausalLM",
    "gemma2": "gemma2 Gemma2ForCausalLM",
    "gemma3": "gemma3 Gemma3ForCausalLM Gemma3ForConditionalGeneration gemma3_text",
    "gemma4": "gemma4 Gemma4ForCausalLM Gemma4ForConditionalGeneration gemma4_text",
    "gemma4_unified": (
        "gemma4_unified Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration gemma4_unified_text"
    ),
    "glm4": "glm4 Glm4ForCausalLM",
    "glm4_moe_lite": "glm4_moe_lite Glm4MoeLiteForCausalLM",
    "glm4moe": "glm4moe Glm4MoeForCausalLM glm4_moe",
    "glm_moe_dsa": "glm_moe_dsa GlmMoeDsaForCausalLM :glm-dsa",
    "gptoss": "gpt-oss GptOssForCausalLM gpt_oss",
    "granite": "granite GraniteForCausalLM",
    "granitemoe": "granitemoe GraniteMoeForCausalLM GraniteMoeSharedForCausalLM granitemoeshared",
    "granitemoehybrid": "granitemoehybrid GraniteMoeHybridForCausalLM :granitehybrid",
    "hunyuan_v1_dense": "hunyuan_v1_dense HunYuanDenseV1ForCausalLM :hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan_v1_moe HunYuanMoEV1ForCausalLM :hunyuan-moe",
    "kimi_k2": "kimi_k2 KimiK2ForCausalLM KimiK25ForConditionalGeneration Kimi_K25ForConditionalGeneration kimi_k25",
    "kimi_linear": "kimi_linear KimiLinearForCausalLM :kimi-linear",
    "lfm2": "lfm2 Lfm2ForCausalLM",
    "lfm2moe": "lfm2moe Lfm2MoeForCausalLM lfm2_moe",
    "llama": "llama LlamaForCausalLM",
    "llama4": "llama4 Llama4ForCausalLM Llama4ForConditionalGeneration llama4_text",
    "marian": "marian MarianMTModel",
    "mimo_v2_flash": "mimo_v2_flash MiMoV2FlashForCausalLM",
    "minimax_m2": "minimax-m2 MiniMaxM2ForCausalLM minimax_m2",
    "ministral3": "ministral3 Ministral3ForCausalLM Mistral3ForConditionalGeneration mistral3",
    "mistral": "mistral MistralForCausalLM",
    "mistral4": "mistral4 Mistral4ForCausalLM",
    "mixtral": "mixtral MixtralForCausalLM",
    "modernbert": "modernbert ModernBertModel ModernBertForMaskedLM ModernBertForSequenceClassification",
    "mt5": "mt5 MT5ForConditionalGeneration MT5EncoderModel",
    "nemotron_h": "nemotron_h NemotronHForCausalLM",
    "nemotron_h_moe": "nemotron_h_moe",
    "nomic_bert": "nomic_bert NomicBertModel :nomic-bert",
    "olmo2": "olmo2 Olmo2ForCausalLM",
    "olmo3": "olmo3 Olmo3ForCausalLM",
    "olmoe": "olmoe OlmoeForCausalLM",
    "phi3": "phi3 Phi3ForCausalLM",
    "qwen2": "qwen2 Qwen2ForCausalLM",
    "qwen25vl": (
        "qwen25vl Qwen2_5_VLForConditionalGeneration Qwen2VLForConditionalGeneration "
        "qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text :qwen2vl"
    ),
    "qwen2moe": "qwen2moe Qwen2MoeForCausalLM qwen2_moe",
    "qwen3": "qwen3 Qwen3ForCausalLM",
    "qwen35": "qwen35 Qwen3_5ForConditionalGeneration Qwen3_5ForCausalLM qwen3_5 qwen3_5_text",
    "qwen35moe": "qwen35moe Qwen3_5MoeForConditionalGeneration Qwen3_5MoeForCausalLM qwen3_5_moe qwen3_5_moe_text",
    "qwen3vl": "qwen3vl Qwen3VLForConditionalGeneration qwen3_vl qwen3_vl_text",
    "qwen3moe": "qwen3moe Qwen3MoeForCausalLM qwen3_moe",
    "qwen3next": "qwen3next Qwen3NextForCausalLM qwen3_next",
    "qwen3vlmoe": "qwen3vlmoe Qwen3VLMoeForConditionalGeneration qwen3_vl_moe qwen3_vl_moe_text",
    "roberta": (
        "roberta RobertaModel XLMRobertaModel RobertaForMaskedLM XLMRobertaForMaskedLM "
        "RobertaForSequenceClassification XLMRobertaForSequenceClassification xlm-roberta camembert"
    ),
    "seed_oss": "seed_oss SeedOssForCausalLM",
    "smollm3": "smollm3 SmolLM3ForCausalLM",
    "t5": "t5 T5ForConditionalGeneration T5WithLMHeadModel T5EncoderModel",
}
FILES = {name: file for file, names in NAMES.items() for name in names.replace(":", "").split()}  # name -> file
