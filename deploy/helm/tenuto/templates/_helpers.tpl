{{- define "tenuto.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tenuto.selector" -}}
app.kubernetes.io/name: tenuto
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tenuto.labels" -}}
{{ include "tenuto.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tenuto.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "tenuto.secret" -}}
{{ .Values.secret.existing | default (include "tenuto.name" .) }}
{{- end -}}

{{- define "tenuto.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "tenuto.name" .) }}
{{- end -}}

{{- /* No service links: a Service named tenuto would set TENUTO_PORT, which is a setting. */ -}}
{{- define "tenuto.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tenuto.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "tenuto.podAnnotations" -}}
checksum/settings: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
checksum/secret: {{ include (print .Template.BasePath "/secret.yaml") . | sha256sum }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tenuto.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tenuto.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tenuto.runtimeEnv" -}}
- name: TENUTO_DATABASE
  valueFrom:
    secretKeyRef:
      name: {{ include "tenuto.secret" . }}
      key: database
{{- if .Values.pooler }}
- name: TENUTO_POOLER
  value: {{ .Values.pooler }}
- name: TENUTO_DATABASE_RUNTIME
  valueFrom:
    secretKeyRef:
      name: {{ include "tenuto.secret" . }}
      key: runtime-database
- name: TENUTO_DATABASE_DIRECT
  valueFrom:
    secretKeyRef:
      name: {{ include "tenuto.secret" . }}
      key: direct-database
      optional: true
{{- end }}
- name: TENUTO_KEYS
  valueFrom:
    secretKeyRef:
      name: {{ include "tenuto.secret" . }}
      key: keys
{{- end -}}
