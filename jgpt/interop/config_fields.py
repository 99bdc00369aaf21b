"""Fields of a Hugging Face `config.json` that don't change the output of a trained model."""

_RECORDS = """
_name_or_path name_or_path _commit_hash _num_labels architectures dtype id2label is_llama_config
label2id model_type num_labels problem_type tokenizer_class torch_dtype transformers_version
transformers.js_config transformers_weights unsloth_fixed unsloth_version
"""
"""The origin of a file, and the records of tools in it."""

_OUTPUTS = """
output_attentions output_hidden_states output_past return_dict return_dict_in_generate torchscript
use_bfloat16 tf_legacy_loss use_return_dict
"""
"""Additional outputs of transformers beside the logits."""

_SPEED = """
_attn_implementation _attn_implementation_autoset _attn_implementation_internal
attn_implementation _flash_attn_2_enabled use_flash_attention_2 use_cache pretraining_tp
reorder_and_upcast_attn chunk_size_feed_forward gradient_checkpointing
"""
"""The order of operations, or the memory, of the same function."""

_TRAINING = """
attention_dropout classifier_dropout finetuning_task initializer_range summary_activation
summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
"""
"""Initialisation, dropout, and classifier heads."""

_GENERATION = """
bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
begin_suppress_tokens prefix task_specific_params max_length min_length max_new_tokens do_sample
early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
num_return_sequences output_scores remove_invalid_values exponential_decay_length_penalty
"""
"""Generation options of transformers, which apply if there is no `generation_config.json`."""

_UNUSED = """
afn is_decoder max_sequence_length max_window_layers n_ctx n_special
original_max_position_embeddings predict_special_tokens sliding_window
"""
"""Fields that transformers does not read in these formats. A `sliding_window` takes effect only
with `use_sliding_window` or `layer_types`, which are checked separately."""

HARMLESS = frozenset((_RECORDS + _OUTPUTS + _SPEED + _TRAINING + _GENERATION + _UNUSED).split())
"""Names that an import accepts with any value. Any other unknown name is an error."""

WRITTEN_ANEW = (
    "_name_or_path",
    "_commit_hash",
    "architectures",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "transformers_weights",
)
"""Names that an export does not copy from the original config of a model."""
