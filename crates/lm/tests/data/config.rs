use march_lm::data::{DataConfig, DataKind};

#[test]
fn what_cannot_be_is_refused() {
    let refused = |config: DataConfig| config.check().unwrap_err().0;
    let good = DataConfig::default();
    assert!(good.check().is_ok());
    assert_eq!(refused(DataConfig { kind: DataKind::Shards, ..good.clone() }), "path");
    assert_eq!(refused(DataConfig { kind: DataKind::Batches, ..good.clone() }), "path");
    let (_, message) = DataConfig { kind: DataKind::Shards, ..good.clone() }.check().unwrap_err();
    assert!(message.contains("`--set data.path=DIR`"), "{message}");
    assert_eq!(refused(DataConfig { path: Some("here".into()), ..good.clone() }), "path");
    assert_eq!(refused(DataConfig { kind: DataKind::Recall, ..good.clone() }), "task");
    assert_eq!(refused(DataConfig { task: Some("mqar".into()), ..good.clone() }), "task");
    let lessons = DataConfig { kind: DataKind::Needles, ..good.clone() };
    assert!(lessons.check().is_ok());
    assert_eq!(refused(DataConfig { path: Some("here".into()), ..lessons.clone() }), "path");
    assert_eq!(refused(DataConfig { text_share: Some(0.5), ..good.clone() }), "text_share");
    assert_eq!(refused(DataConfig { text_share: Some(1.5), ..lessons.clone() }), "text_share");
    let (key, message) =
        DataConfig { task: Some("niah_single1".into()), ..lessons.clone() }.check().unwrap_err();
    assert!(key == "task" && message.contains("did you mean `niah_single_1`?"), "{message}");
    let mut whole = lessons;
    whole.complete();
    assert!(whole.text_share == Some(0.25) && whole.check().is_ok());
    assert_eq!(whole.task.map(|tasks| tasks.split(',').count()), Some(6));
    for sequence_length in [0, (1 << 24) + 1, usize::MAX] {
        let task = Some("mqar".to_string());
        let recall = DataConfig { kind: DataKind::Recall, task, sequence_length, ..good.clone() };
        assert_eq!(refused(recall), "sequence_length");
    }
}
