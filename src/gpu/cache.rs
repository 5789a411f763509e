//! Pipelines kept on disk between runs, where the device has `PIPELINE_CACHE` (wgpu offers it on Vulkan).
//!
//! A file holds what the driver gave, for one adapter, driver version and version of this crate. What is read
//! back reaches the driver only if the file is whole and its key is the one expected: drivers are not written
//! to withstand other data. Any other file is ignored and replaced; what is no file (a directory, say) is ignored
//! and left, and nothing is kept. A file is written beside its name and renamed, readable by its owner alone; of two
//! programs that end at once, one's file stays.
//!
//! The file protects against accidents, not against somebody who may write to the directory, so the directory
//! should belong to the user alone. Files and directories that others may write to are not read.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// First bytes of a file. The last one counts layouts of the file.
const MAGIC: [u8; 8] = *b"EDAPIPE1";
/// Magic, length of the key, length of the data, checksum of both.
const HEADER: usize = 8 + 8 + 8 + 16;
/// Longer files are not read. A whole family of kernels is a few megabytes.
const MOST_BYTES: u64 = 256 << 20;

/// What was found when the cache was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Pipelines of an earlier run.
    Pipelines,
    /// No file.
    Nothing,
    /// Something that is not used: damaged, of another adapter, driver or version, open to others, or no file.
    Refused,
}

/// A device's pipeline cache with its file. Saved when dropped.
pub struct DiskCache {
    cache: wgpu::PipelineCache,
    directory: PathBuf,
    path: PathBuf,
    key: Vec<u8>,
    found: Found,
    /// Checksum of the data on disk, 0 where there is none.
    on_disk: u64,
}

/// What a file must have been written for: adapter, driver, crate.
fn key(info: &wgpu::AdapterInfo, name: &str) -> Vec<u8> {
    [
        name,
        &info.name,
        &info.driver,
        &info.driver_info,
        env!("CARGO_PKG_VERSION"),
    ]
    .join("\n")
    .into_bytes()
}

/// The file's bytes for this data.
fn pack(key: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + key.len() + data.len());
    out.extend(MAGIC);
    out.extend((key.len() as u64).to_le_bytes());
    out.extend((data.len() as u64).to_le_bytes());
    out.extend(checksum(key, data).to_le_bytes());
    out.extend(key);
    out.extend(data);
    out
}

fn checksum(key: &[u8], data: &[u8]) -> u128 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    hasher.update(key);
    hasher.update(data);
    hasher.digest128() ^ xxh3_128(&(key.len() as u64).to_le_bytes())
}

/// The data of a file, if it is whole and was written for this key.
fn unpack<'a>(key: &[u8], file: &'a [u8]) -> Option<&'a [u8]> {
    let rest = file.strip_prefix(&MAGIC)?;
    let (key_len, rest) = rest.split_first_chunk::<8>()?;
    let (data_len, rest) = rest.split_first_chunk::<8>()?;
    let (sum, rest) = rest.split_first_chunk::<16>()?;
    let data = rest.strip_prefix(key)?;
    let whole = u64::from_le_bytes(*key_len) == key.len() as u64
        && u64::from_le_bytes(*data_len) == data.len() as u64
        && u128::from_le_bytes(*sum) == checksum(key, data);
    whole.then_some(data)
}

/// Whether only its owner may write to what this is about.
#[cfg(unix)]
fn is_private(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    metadata.permissions().mode() & 0o022 == 0
}

/// Elsewhere the directory's access list decides, which user directories have.
#[cfg(not(unix))]
fn is_private(_: &std::fs::Metadata) -> bool {
    true
}

/// The file's bytes; `None` where there is no file, an error where it cannot be trusted or read.
fn read(directory: &Path, path: &Path) -> io::Result<Option<Vec<u8>>> {
    // Looked at before it is opened: opening a pipe would wait for somebody to write to it.
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(io::ErrorKind::PermissionDenied.into()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    }
    let file = std::fs::File::open(path)?;
    let metadata = file.metadata()?;
    let trusted = metadata.is_file()
        && metadata.len() <= MOST_BYTES
        && is_private(&metadata)
        && is_private(&std::fs::metadata(directory)?);
    if !trusted {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

impl DiskCache {
    /// The cache of a device with its file in `directory`, which need not exist. `None` where the device was
    /// opened without `PIPELINE_CACHE`, or its backend has none.
    pub fn open(device: &wgpu::Device, directory: &Path) -> Option<Self> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let info = device.adapter_info();
        let name = wgpu::util::pipeline_cache_key(&info)?;
        let key = key(&info, &name);
        let path = directory.join(format!("{name}_{:016x}.bin", xxh3_64(&key)));
        let file = read(directory, &path);
        let data = match &file {
            Ok(Some(bytes)) => unpack(&key, bytes),
            _ => None,
        };
        let found = match (&file, data) {
            (_, Some(_)) => Found::Pipelines,
            (Ok(None), None) => Found::Nothing,
            _ => Found::Refused,
        };
        let descriptor = wgpu::PipelineCacheDescriptor {
            label: Some("eda"),
            data,
            fallback: true,
        };
        let cache = super::kernels::guarded(device, "the pipeline cache", 0, || {
            // SAFETY: the data is what `get_data` returned for this adapter, driver and version of this crate:
            // the key says so, the checksum says that it is complete and unchanged, and nobody but the user
            // may write to the file.
            unsafe { device.create_pipeline_cache(&descriptor) }
        })
        .ok()?;
        Some(Self {
            on_disk: data.map_or(0, xxh3_64),
            cache,
            directory: directory.to_owned(),
            path,
            key,
            found,
        })
    }

    /// The cache, for [`crate::gpu::kernels::Kernels::with_pipeline_cache`].
    pub fn cache(&self) -> &wgpu::PipelineCache {
        &self.cache
    }

    /// What was found when it was opened.
    pub fn found(&self) -> Found {
        self.found
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file, if there is something new; dropping the cache does the same.
    ///
    /// # Errors
    /// Those of the file system: no such directory and none can be made, not writable, full, a directory in the
    /// place of the file.
    pub fn save(&mut self) -> io::Result<()> {
        let Some(data) = self.cache.get_data() else {
            return Ok(());
        };
        let sum = xxh3_64(&data);
        if sum == self.on_disk {
            return Ok(());
        }
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&self.directory)?;
        // Temporary files are private to their owner.
        let mut file = tempfile::Builder::new()
            .prefix(".eda-")
            .tempfile_in(&self.directory)?;
        file.write_all(&pack(&self.key, &data))?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        self.on_disk = sum;
        Ok(())
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        // A cache that cannot be kept costs time in the next run, nothing else.
        let _ = self.save();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_whole_or_not_at_all() {
        let file = pack(b"adapter, driver", b"data of the driver");
        assert_eq!(
            unpack(b"adapter, driver", &file),
            Some(&b"data of the driver"[..])
        );
        assert_eq!(unpack(b"", &pack(b"", b"")), Some(&b""[..]));
        for other in [
            "adapter, driver 2",
            "adapter",
            "",
            "adapter, driverd",
            "bdapter, driver",
        ] {
            assert_eq!(unpack(other.as_bytes(), &file), None, "{other}");
        }
        for len in 0..file.len() {
            assert_eq!(
                unpack(b"adapter, driver", &file[..len]),
                None,
                "{len} bytes"
            );
        }
        for i in 0..file.len() * 8 {
            let mut file = file.clone();
            file[i / 8] ^= 1 << (i % 8);
            assert_eq!(unpack(b"adapter, driver", &file), None, "bit {i}");
        }
        let longer: Vec<u8> = file.iter().copied().chain([0]).collect();
        assert_eq!(unpack(b"adapter, driver", &longer), None);
    }

    /// A file that others may write to says nothing about its contents.
    #[cfg(unix)]
    #[test]
    fn files_and_directories_that_others_may_write_to_are_not_read() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("kept");
        let path = directory.join("file");
        let allow = |path: &Path, mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, permissions).expect("permitted");
        };
        let refused = || read(&directory, &path).expect_err("refused").kind();
        std::fs::create_dir(&directory).expect("made");
        allow(&directory, 0o700);
        assert_eq!(read(&directory, &path).expect("nothing there"), None);
        std::fs::write(&path, "data").expect("written");
        for mode in [0o666, 0o620, 0o602] {
            allow(&path, mode);
            assert_eq!(refused(), io::ErrorKind::PermissionDenied, "{mode:o}");
            allow(&path, 0o600);
            let data = read(&directory, &path).expect("read");
            assert_eq!(data.as_deref(), Some(&b"data"[..]));
        }
        allow(&directory, 0o777);
        assert_eq!(refused(), io::ErrorKind::PermissionDenied);
        allow(&directory, 0o700);
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("made");
        assert_eq!(refused(), io::ErrorKind::PermissionDenied);
    }
}
