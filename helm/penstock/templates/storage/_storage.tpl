{{/* Storage of runs, and the pods that share one node for it. */}}

{{- define "penstock.storage.claimName" -}}
{{ (.Values.storage.claim | default dict).existingClaim | default (printf "%s-runs" (include "penstock.fullname" .)) }}
{{- end }}

{{- define "penstock.storage.roles" -}}
{{- /* The roles with storage, as JSON. A verifier writes only its log. */ -}}
["head","cpu","rollout","learner"]
{{- end }}

{{- define "penstock.storage.shared" -}}
{{- /* (dict "root" $ "role" "cpu"): "true" if the pod mounts the volume that keeps these pods on one node. */ -}}
{{- $storage := .root.Values.storage -}}
{{- if and (eq $storage.kind "claim") (eq $storage.claim.accessMode "ReadWriteOnce") $storage.claim.sameNode (has .role (include "penstock.storage.roles" .root | fromJsonArray)) -}}true{{- end -}}
{{- end }}

{{- define "penstock.storage.volume" -}}
{{- /* (dict "root" $ "role" "cpu") */ -}}
{{- $storage := .root.Values.storage -}}
- name: runs
{{- if not (has .role (include "penstock.storage.roles" .root | fromJsonArray)) }}
  emptyDir:
    sizeLimit: 1Gi
{{- else if eq $storage.kind "claim" }}
  persistentVolumeClaim:
    claimName: {{ include "penstock.storage.claimName" .root }}
{{- else if $storage.s3.scratch.storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ $storage.s3.scratch.storageClass }}
        resources:
          requests:
            storage: {{ $storage.s3.scratch.size }}
{{- else }}
  emptyDir: {{ include "penstock.emptyDir" $storage.s3.scratch.size }}
{{- end }}
{{- end }}

{{- define "penstock.storage.env" -}}
{{- /* (dict "root" $ "role" "cpu") */ -}}
- name: PENSTOCK_RUNS
  value: /var/lib/penstock
{{ include "penstock.storage.roots" .root }}
{{- $storage := .root.Values.storage }}
{{- if and (eq $storage.kind "s3") (has .role (include "penstock.storage.roles" .root | fromJsonArray)) }}
{{- with $storage.s3 }}
- name: PENSTOCK_STORE
  value: {{ .url | quote }}
- name: AWS_REGION
  value: {{ .region | default "" | quote }}
{{- if .endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ .endpoint | quote }}
{{- end }}
{{- if .existingSecret }}
{{- $secret := .existingSecret }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.storage.roots" -}}
{{- /* Below which folders and addresses recipes may name files: also for the API, which mounts no storage. An upgrade
       that reuses the values of an older release has no `roots`. */ -}}
{{- $own := ternary "/var/lib/penstock" .Values.storage.s3.url (eq .Values.storage.kind "claim") -}}
- name: PENSTOCK_ROOTS
  value: {{ prepend (.Values.storage.roots | default list) $own | join "," | quote }}
{{- end }}

{{- define "penstock.storage.checksum" -}}
{{- /* Credentials are environment variables, which are read once, at the start. */ -}}
{{ get (lookup "v1" "Secret" .Release.Namespace .Values.storage.s3.existingSecret | default dict) "data" | toJson | sha256sum }}
{{- end }}

{{- define "penstock.storage.ports" -}}
{{- /* Ports for the NetworkPolicy, as JSON: the configured ones, otherwise the endpoint's. */ -}}
{{- $url := urlParse (.Values.storage.s3.endpoint | default "") -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (eq $url.scheme "http" | ternary "80" "443") -}}
{{ .Values.networkPolicy.objectStore.ports | default (list (int $port)) | toJson }}
{{- end }}

{{- define "penstock.storage.affinity" -}}
{{- /* (dict "root" $ "role" "cpu" "of" .Values.cpu): the group's affinity, and the shared node, as JSON. */ -}}
{{- $affinity := deepCopy (.of.affinity | default dict) -}}
{{- if include "penstock.storage.shared" . -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $preferred := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (dict "penstock.dev/shares-volume" (include "penstock.fullname" .root))) -}}
{{- $pods := $affinity.podAffinity | default dict -}}
{{- $_ := set $pods $required (append (get $pods $required | default list) $term) -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- if include "penstock.anyGpus" .root -}}
{{- $nodes := $affinity.nodeAffinity | default dict -}}
{{- $terms := get $nodes $preferred | default list -}}
{{- range .root.Values.ray.gpuNodeLabels -}}
{{- $terms = append $terms (dict "weight" 100 "preference" (dict "matchExpressions" (list (dict "key" . "operator" "Exists")))) -}}
{{- end -}}
{{- $_ := set $nodes $preferred $terms -}}
{{- $_ := set $affinity "nodeAffinity" $nodes -}}
{{- end -}}
{{- end -}}
{{ toJson $affinity }}
{{- end }}

{{- define "penstock.anyGpus" -}}
{{- range include "penstock.workers" . | fromJsonArray -}}
{{- if gt (int .of.gpus) 0 -}}true{{- end -}}
{{- end -}}
{{- end }}
