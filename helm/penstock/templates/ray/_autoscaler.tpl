{{- define "penstock.ray.autoscaler" -}}
version: v2
{{- with .Values.ray.autoscaler.idleTimeoutSeconds }}
idleTimeoutSeconds: {{ . }}
{{- end }}
{{- with .Values.ray.autoscaler.upscalingMode }}
upscalingMode: {{ . }}
{{- end }}
image: {{ include "penstock.image" (dict "root" . "flavour" "cpu") }}
imagePullPolicy: {{ .Values.image.pullPolicy | default "IfNotPresent" }}
# Autoscaler v2 does not allow the pod to restart containers, and the autoscaler exits on an error of the Kubernetes
# API: without this loop the cluster would not scale again.
command: [sh, -c]
args:
  - |-
    trap 'kill $! 2>/dev/null; exit 0' TERM INT
    while true; do
      ray kuberay-autoscaler --cluster-name "$RAY_CLUSTER_NAME" --cluster-namespace "$RAY_CLUSTER_NAMESPACE" &
      wait $!
      echo "autoscaler: ended with status $?; starts again in 5 s" >&2
      sleep 5 &
      wait $!
    done
env:
  - name: HOME
    value: /tmp/home
resources:
  {{- include "penstock.resources" (dict "of" .Values.ray.autoscaler) | nindent 2 }}
securityContext:
  {{- include "penstock.containerSecurity" (dict "uid" 10001) | nindent 2 }}
volumeMounts:
  - name: autoscaler-tmp
    mountPath: /tmp
  - name: ray-logs
    mountPath: /tmp/ray
  # The only container with a token for the Kubernetes API, except the Job of `helm uninstall`.
  {{- include "penstock.tokenMount" . | nindent 2 }}
{{- end }}
