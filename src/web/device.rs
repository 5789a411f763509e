//! A WebGPU device for the engine: one of the page's, or one of our own.
//!
//! wgpu makes its devices itself, from `navigator.gpu.requestAdapter()`. To have it take one that is there already,
//! that function is replaced for the duration of one synchronous call by one that answers with an adapter whose
//! `requestDevice()` gives that device. Our own devices go the same way, so that we see what wgpu does not show:
//! the adapter's vendor and architecture, and internal errors, which it cannot take.

use super::error::{Failure, Result, text};
use super::input::{get, set};
use crate::engine::{Backend, Element};
use crate::error::Error;
use js_sys::{Array, Function, Object, Promise, Reflect};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

/// Limits that the kernels use; all that the adapter has is asked for.
const LIMITS: [&str; 9] = [
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxStorageBuffersPerShaderStage",
    "maxComputeWorkgroupStorageSize",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupSizeX",
    "maxComputeWorkgroupsPerDimension",
    "minStorageBufferOffsetAlignment",
    "minUniformBufferOffsetAlignment",
];

/// A device and what is known about it.
pub(super) struct Opened {
    /// The `GPUDevice`.
    pub(super) raw: JsValue,
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) about: About,
}

/// What a browser tells about an adapter.
pub(super) struct About {
    pub(super) name: String,
    pub(super) software: bool,
    pub(super) timestamps: bool,
    pub(super) elements: Vec<Element>,
    /// Names and values, in the order of [`LIMITS`].
    pub(super) limits: Vec<(&'static str, f64)>,
}

/// `navigator.gpu`.
fn gpu() -> Result<Option<JsValue>> {
    let navigator = get(&js_sys::global(), "navigator")?.unwrap_or_default();
    get(&navigator, "gpu")
}

/// Calls a method.
pub(super) fn call(object: &JsValue, method: &str, arguments: &[JsValue]) -> Result<JsValue> {
    let function: Function = get(object, method)?
        .and_then(|f| f.dyn_into().ok())
        .ok_or_else(|| Error::Device(format!("{method} is not there")))?;
    function
        .apply(object, &arguments.iter().collect::<Array>())
        .map_err(Failure::Thrown)
}

/// Waits for what a method promises; a rejection is a device error.
async fn answer(object: &JsValue, method: &str, arguments: &[JsValue]) -> Result<JsValue> {
    let promise = call(object, method, arguments)?;
    JsFuture::from(Promise::resolve(&promise))
        .await
        .map_err(|e| Error::Device(format!("{method}: {}", text(&e))).into())
}

/// Why there is no adapter.
pub(super) fn no_adapter(backend: Backend, why: &str) -> Error {
    Error::NoAdapter(format!("nothing matches backend {}; {why}", backend.name()))
}

/// The browser's adapter, or why there is none.
pub(super) async fn adapter(options: &JsValue) -> Result<Result<JsValue, &'static str>> {
    let Some(gpu) = gpu()? else {
        return Ok(Err(
            "this browser has no WebGPU, or the page is not a secure context (https or localhost)",
        ));
    };
    let request = Object::new();
    let preference = get(options, "powerPreference")?;
    set(
        &request,
        "powerPreference",
        preference.unwrap_or_else(|| "high-performance".into()),
    );
    let adapter = answer(&gpu, "requestAdapter", &[request.into()]).await?;
    if adapter.is_null() || adapter.is_undefined() {
        return Ok(Err("the browser offers no WebGPU adapter"));
    }
    Ok(Ok(adapter))
}

impl About {
    /// Reads an adapter's (or a device's) own description.
    pub(super) fn read(owner: &JsValue) -> Result<Self> {
        let info = match get(owner, "info")? {
            Some(info) => info,
            None => get(owner, "adapterInfo")?.unwrap_or_default(),
        };
        let word = |key| -> Result<String> {
            let value = get(&info, key)?.and_then(|v| v.as_string());
            Ok(value.unwrap_or_default())
        };
        let flag = |holder: &JsValue| -> Result<bool> {
            Ok(get(holder, "isFallbackAdapter")?.is_some_and(|v| v.is_truthy()))
        };
        let (vendor, architecture) = (word("vendor")?, word("architecture")?);
        let named = [word("description")?, word("device")?];
        let described = named.into_iter().find(|s| !s.is_empty());
        let name = described.unwrap_or_else(|| match (&*vendor, &*architecture) {
            ("", "") => "WebGPU adapter without a name".into(),
            (vendor, "") => vendor.into(),
            (vendor, architecture) => format!("{vendor} {architecture}"),
        });
        let limits = get(owner, "limits")?.unwrap_or_default();
        let limits = LIMITS
            .into_iter()
            .map(|name| Ok((name, get(&limits, name)?.and_then(|v| v.as_f64()))))
            .collect::<Result<Vec<_>>>()?;
        let features = get(owner, "features")?.unwrap_or_default();
        let has = |feature: &str| -> Result<bool> {
            Ok(call(&features, "has", &[feature.into()])?.is_truthy())
        };
        let mut elements = vec![Element::F32];
        if has("shader-f16")? {
            elements.push(Element::F16);
        }
        let lower = name.to_lowercase();
        Ok(Self {
            software: flag(&info)?
                || flag(owner)?
                || architecture == "swiftshader"
                || ["swiftshader", "llvmpipe", "lavapipe", "basic render"]
                    .iter()
                    .any(|known| lower.contains(known)),
            name,
            timestamps: has("timestamp-query")?,
            elements,
            limits: limits
                .into_iter()
                .filter_map(|(name, value)| Some((name, value?)))
                .collect(),
        })
    }
}

/// A device of our own, with all that the adapter offers and the kernels use.
pub(super) async fn open(adapter: &JsValue) -> Result<Opened> {
    let about = About::read(adapter)?;
    let features = Array::new();
    if about.elements.contains(&Element::F16) {
        features.push(&"shader-f16".into());
    }
    if about.timestamps {
        features.push(&"timestamp-query".into());
    }
    let limits = Object::new();
    for &(name, value) in &about.limits {
        set(&limits, name, value);
    }
    let request = Object::new();
    set(&request, "label", "eda");
    set(&request, "requiredFeatures", features);
    set(&request, "requiredLimits", limits);
    let raw = answer(adapter, "requestDevice", &[request.into()]).await?;
    let info = get(adapter, "info")?.unwrap_or_default();
    lend(raw, info, about).await
}

/// The page's device.
pub(super) async fn adopt(raw: JsValue) -> Result<Opened> {
    if get(&raw, "queue")?.is_none() || get(&raw, "lost")?.is_none() {
        return Err(Error::unsupported("device", format!("{raw:?}"), "a GPUDevice").into());
    }
    let about = About::read(&raw)?;
    let info = get(&raw, "adapterInfo")?.unwrap_or_default();
    lend(raw, info, about).await
}

/// Makes wgpu take a device that is there already.
async fn lend(raw: JsValue, info: JsValue, about: About) -> Result<Opened> {
    let gpu = gpu()?.ok_or_else(|| Error::Device("navigator.gpu is not there".into()))?;
    let stand_in = Object::new();
    for key in ["features", "limits"] {
        set(&stand_in, key, get(&raw, key)?.unwrap_or_default());
    }
    set(&stand_in, "info", info);
    set(&stand_in, "requestDevice", promising(raw.clone()));

    let property = Object::new();
    set(&property, "configurable", true);
    set(&property, "value", promising(stand_in.into()));
    let replaced: &Object = gpu.unchecked_ref();
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: wgpu::Backends::BROWSER_WEBGPU,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    Object::define_property(replaced, &"requestAdapter".into(), &property);
    // The request is made here; only its answer is waited for.
    let asked = instance.request_adapter(&Default::default());
    let restored = Reflect::delete_property(replaced, &"requestAdapter".into());
    if !restored.is_ok_and(|done| done) {
        return Err(Error::Device("navigator.gpu cannot be lent a device".into()).into());
    }
    let refused = |e: &dyn std::fmt::Display| Error::Device(format!("{}: {e}", about.name));
    let adapter = asked.await.map_err(|e| refused(&e))?;
    // The stand-in has the device whatever is asked for.
    let (device, queue) = adapter
        .request_device(&Default::default())
        .await
        .map_err(|e| refused(&e))?;
    Ok(Opened {
        raw,
        device,
        queue,
        about,
    })
}

/// A function that promises a value.
fn promising(value: JsValue) -> JsValue {
    Closure::once_into_js(move || Promise::resolve(&value))
}
