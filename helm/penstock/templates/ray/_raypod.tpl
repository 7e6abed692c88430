{{- define "penstock.ray.template" -}}
{{- /* (dict "root" $ "role" "rollout" "of" .Values.rollout): the pod template of a group. */ -}}
{{- $root := .root -}}
{{- $gpus := int .of.gpus -}}
{{- $files := has .role (include "penstock.storage.roles" $root | fromJsonArray) -}}
{{- $more := deepCopy .of.extraResources -}}
{{- if $gpus }}{{- $_ := set $more (include "penstock.ray.gpuResource" $root) (toString $gpus) }}{{- end -}}
metadata:
  labels:
    {{- include "penstock.podLabels" (dict "root" $root "component" .role "more" ($files | ternary $root.Values.serviceAccount.podLabels dict)) | nindent 4 }}
    {{- if include "penstock.storage.shared" . }}
    penstock.dev/shares-volume: {{ include "penstock.fullname" $root }}
    {{- end }}
  annotations:
    # No checksum of the bounds, and of the password of Redis: they are read at each use. Ray's head reads its own once;
    # a new one must not replace all pods (docs/operations/redis.md, Changing passwords).
    penstock.dev/redis-secret: {{ include "penstock.redis.secretName" $root }}
    # KubeRay 1.7 ignores tolerations when it looks for a changed template: Kueue may add some. This it does not ignore.
    checksum/tolerations: {{ include "penstock.ray.tolerations" . | sha256sum }}
    {{- if and $files (eq $root.Values.storage.kind "s3") $root.Values.storage.s3.existingSecret }}
    checksum/store-auth: {{ include "penstock.storage.checksum" $root }}
    {{- end }}
    {{- if and (eq .role "cpu") (dig "enabled" false ($root.Values.hub | default dict)) $root.Values.hub.existingSecret }}
    checksum/hub-auth: {{ include "penstock.hub.checksum" $root }}
    {{- end }}
    {{- if and (eq .role "cpu") (dig "enabled" false ($root.Values.tracking | default dict)) $root.Values.tracking.existingSecret }}
    checksum/tracking-auth: {{ include "penstock.tracking.checksum" $root }}
    {{- end }}
    {{- if eq .role "verifier" }}
    {{- include "penstock.rewards.checksums" $root | nindent 4 }}
    {{- end }}
    {{- with .of.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  # Autoscaler v2 requires it: it replaces pods, and a restarted container would keep the name of the dead Ray node.
  restartPolicy: Never
  serviceAccountName: {{ include "penstock.fullname" $root }}{{ eq .role "head" | ternary "-head" ($files | ternary "-files" "") }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if include "penstock.code.namespaces" . }}
  # bubblewrap mounts a new /proc, which the kernel allows only where no part of the container's own is masked.
  hostUsers: false
  {{- end }}
  terminationGracePeriodSeconds: 90
  {{- with $root.Values.ray.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- if include "penstock.ray.elastic" $root }}
  # Kueue adds this at the creation only, demands it at each update, and removes it from the pods that it admits.
  schedulingGates:
    - name: kueue.x-k8s.io/elastic-job
  {{- end }}
  {{- include "penstock.pullSecrets" $root | nindent 2 }}
  securityContext:
    {{- include "penstock.podSecurity" (dict "uid" 10001) | nindent 4 }}
  {{- $placed := merge (dict
        "nodeSelector" (include "penstock.ray.nodeSelector" . | fromJson)
        "tolerations" (include "penstock.ray.tolerations" . | fromJsonArray)
        "affinity" (include "penstock.storage.affinity" . | fromJson)) .of }}
  {{- include "penstock.scheduling" (dict "of" $placed) | nindent 2 }}
  containers:
    - name: ray-{{ eq .role "head" | ternary "head" "worker" }}
      image: {{ include "penstock.image" (dict "root" $root "flavour" (gt $gpus 0 | ternary "gpu" "cpu")) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy | default "IfNotPresent" }}
      {{- if eq .role "head" }}
      command: [python, -m, deploy.kubernetes.head]
      {{- else }}
      command: [python, -m, deploy.kubernetes.node, --role, {{ .role }}]
      {{- end }}
      ports:
        - name: node
          containerPort: 8471
        # Ray's own metrics, closed unless metrics.podMonitor is enabled; Penstock's metrics are on ports 9400 to 9499.
        - name: metrics
          containerPort: 8080
        {{- if eq .role "head" }}
        # KubeRay builds the head's Service from these names.
        - name: gcs-server
          containerPort: 6379
        {{- if $root.Values.ray.dashboard }}
        - name: dashboard
          containerPort: 8265
        {{- end }}
        {{- end }}
      env:
        {{- include "penstock.ray.env" . | nindent 8 }}
      {{- if and (eq .role "verifier") .of.rewardSecret }}
      envFrom:
        - secretRef:
            name: {{ .of.rewardSecret }}
      {{- end }}
      startupProbe:
        {{- include "penstock.probe" (dict "path" "/healthz" "port" "node" "period" 5 "failures" 60) | nindent 8 }}
      livenessProbe:
        {{- include "penstock.probe" (dict "path" "/healthz" "port" "node" "period" 10 "failures" 6) | nindent 8 }}
      # A rollout pod is ready when every replica in it holds a verified policy version.
      readinessProbe:
        {{- include "penstock.probe" (dict "path" "/readyz" "port" "node" "period" 5 "failures" 3) | nindent 8 }}
      resources:
        {{- include "penstock.resources" (dict "of" .of "more" $more) | nindent 8 }}
      securityContext:
        {{- include "penstock.containerSecurity" (dict "uid" 10001 "of" (eq .role "verifier-code" | ternary .of dict)) | nindent 8 }}
      volumeMounts:
        {{- include "penstock.ray.mounts" . | nindent 8 }}
  volumes:
    {{- include "penstock.ray.volumes" . | nindent 4 }}
{{- end }}
